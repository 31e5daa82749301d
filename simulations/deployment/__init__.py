"""A deployment on loopback: SuperLink, SuperNodes, TLS, keys, one file per party."""

from .cluster import (
    Cluster,
    PartySpec,
    ServerFiles,
    make_key_pair,
    make_server_files,
    write_party_files,
)

__all__ = [
    "Cluster",
    "PartySpec",
    "ServerFiles",
    "make_key_pair",
    "make_server_files",
    "write_party_files",
]
