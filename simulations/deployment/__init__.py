"""A deployment on loopback: SuperLink, SuperNodes, TLS, keys, one file per party."""
