"""Write what each machine of compose.yaml needs: certificates, keys, settings, data.

Each folder is one machine's. With data of your own, replace the CSV files. Certificates
are for trying this out; between organisations, every party makes its own key.
"""

import argparse
import shutil
from pathlib import Path

from flower_vfl.simulations.config import ConfigValue
from flower_vfl.simulations.deployment.cluster import (
    ID_COLUMN,
    LABEL_COLUMN,
    make_key_pair,
    make_server_files,
    write_party_files,
)
from flower_vfl.simulations.runtime.flower_runtime import write_settings


def main() -> None:
    """Write the folders, unless they have been written before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", required=True, help="HOST:PORT of the SuperLink")
    parser.add_argument("--sessions", required=True, help="HOST:PORT of training")
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    folder, server = given.folder, given.folder / "server"
    if (server / "run.toml").exists():
        print(f"{folder} is prepared already")
        return
    hosts = dict.fromkeys([given.server.split(":")[0], "127.0.0.1", "localhost"])
    tls = make_server_files(server, list(hosts), days=90)
    nodes: dict[str, ConfigValue] = {}
    for party in write_party_files(folder):
        home = folder / party.name
        shutil.copy(tls.authority, home)
        key = make_key_pair(home, party.name)
        shutil.copy(key.with_suffix(".pub"), server)
        node: dict[str, ConfigValue] = {"role": party.role, "name": party.name}
        node |= {"data": str(party.data), "state-dir": str(home / "state")}
        if party.role == "label":
            node |= {"report-loss": "all", "report-metrics": "all"}
        write_settings(home / "node.toml", node)
        nodes[party.name] = f"{party.role} {party.name}"
    write_settings(server / "nodes.toml", nodes)
    connection = f'[superlink.vertical]\naddress = "{given.server}"\n'
    connection += f'root-certificates = "{tls.authority}"\n'
    (server / "config.toml").write_text(connection)
    settings: dict[str, ConfigValue] = {
        "id-column": ID_COLUMN,
        "label-column": LABEL_COLUMN,
        "parties": len(nodes) - 1,
        "epochs": given.epochs,
        "batch-size": 35,  # divides the training rows: no small batch is left over
        "defense": "marvell:s=4",
        "defense-at": "label",
        "checkpoint-every": 100,
        "state-dir": str(server / "state"),
        "out": str(server / "result"),
        "address": f"0.0.0.0:{given.sessions.split(':')[1]}",
        "advertise": given.sessions,
        "certificate": str(tls.certificate),
        "private-key": str(tls.key),
        "root-certificate": str(tls.authority),
        "nodes": str(server / "nodes.toml"),
    }
    write_settings(server / "run.toml", settings)
    print(f"wrote {folder}: server, {', '.join(nodes)}")


if __name__ == "__main__":
    main()
