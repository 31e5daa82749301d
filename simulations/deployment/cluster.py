"""A SuperLink and SuperNodes on loopback, each in its own process.

Between organisations, the server's certificate comes from a real authority and every
party makes its own key (see the README).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives import serialization as formats
from cryptography.hazmat.primitives.asymmetric import ec

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.parties.checkpoints import write_private
from flower_vfl.simulations.config import ConfigValue
from flower_vfl.simulations.datasets import load_dataset
from flower_vfl.simulations.datasets.vertical import party_columns

from ..runtime import flower_runtime
from ..runtime.flower_runtime import CONNECTION, LOOPBACK, Deadline, Runtime, plain


@dataclass(frozen=True)
class ServerFiles:
    """Files of the server's TLS."""

    authority: Path
    certificate: Path
    key: Path


def make_server_files(folder: Path, hosts: Sequence[str], days: int = 1) -> ServerFiles:
    """Make an authority and a server certificate; the authority's key is not kept."""
    try:
        import trustme
    except ImportError as error:
        remedy = "trustme: pip install 'flower-vfl[sim]'"
        raise ConfigError(f"a deployment's certificates need {remedy}") from error
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA(path_length=0)
    end = datetime.now(UTC) + timedelta(days=days)
    server = authority.issue_cert(*hosts, common_name=hosts[0], not_after=end)
    files = ServerFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    authority.cert_pem.write_to_path(files.authority)
    server.cert_chain_pems[0].write_to_path(files.certificate)
    write_private(files.key, server.private_key_pem.bytes())
    return files


def make_key_pair(folder: Path, name: str) -> Path:
    """Make a SuperNode's key, like ``ssh-keygen -t ecdsa -b 384 -f <name>_key``."""
    folder.mkdir(parents=True, exist_ok=True)
    key, private = ec.generate_private_key(ec.SECP384R1()), folder / f"{name}_key"
    openssh, unlocked = formats.PrivateFormat.OpenSSH, formats.NoEncryption()
    text = key.private_bytes(formats.Encoding.PEM, openssh, unlocked)
    write_private(private, text)
    kind = formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(*kind)
    private.with_suffix(".pub").write_bytes(public + b"\n")
    return private


ID_COLUMN = "id"
LABEL_COLUMN = "label"
NAMES = ("bank", "shop", "telco")
APP = Path(__file__).resolve().parents[1] / "label_leakage"
_POLL = 0.1  # seconds between two checks of a server or a process
_START = 60.0  # seconds until a process must be ready
_STOP = 10.0  # seconds until a SuperNode must have stopped


@dataclass(frozen=True)
class PartySpec:
    """One party of a deployment."""

    name: str
    role: Literal["label", "passive"]
    data: Path


def write_party_files(
    folder: Path, dataset: str = "breast-cancer", names: Sequence[str] = NAMES
) -> list[PartySpec]:
    """Divide a table by columns into one CSV file per party; the first has labels."""
    data = load_dataset(dataset)
    if data.table is None:
        raise ConfigError(f"'{dataset}' is not a table; choose one that is")
    codes = data.split(0, 0.2, 0.0)
    columns = party_columns(data, codes, len(names) - 1, label_share=0.2)
    parties = []
    for number, (name, own) in enumerate(zip(names, columns, strict=True)):
        frame = data.table[list(own)].copy()
        if not number:
            frame.insert(0, LABEL_COLUMN, data.labels)
        frame.insert(0, ID_COLUMN, data.ids)
        file = folder / name / f"{name}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Each party exports its rows in a different order.
        frame.sample(frac=1.0, random_state=number).to_csv(file, index=False)
        parties.append(PartySpec(name, "passive" if number else "label", file))
    return parties


class Cluster:
    """The processes of one deployment; leaving the context ends all of them.

    The SuperLink uses TLS with a new certificate, and admits only SuperNodes whose
    public key was registered. ``server/`` has the files of the server's operator,
    ``<party>/`` those of a party.
    """

    def __init__(
        self,
        folder: Path,
        parties: Sequence[PartySpec],
        say: Callable[[str], None] = print,
    ) -> None:
        if os.name != "posix":
            raise VerticalError("this needs Linux or macOS; on Windows use WSL2")
        self.folder = folder.resolve()
        self.parties = {party.name: party for party in parties}
        self.server = self.folder / "server"
        self.port = flower_runtime.free_port()
        self._say = say
        self._keys: dict[str, Path] = {}
        self._home, scratch = self.server / "flower", tempfile.mkdtemp(prefix="vfl-")
        self.runtime = Runtime(self._home, Path(scratch))
        self.processes: dict[str, flower_runtime.Process] = {}
        certificates = self.server / "certificates"
        self.tls = make_server_files(certificates, [LOOPBACK, "localhost"])

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, register the parties' keys and start their SuperNodes."""
        flower_runtime.write_connection(self._home, self.port, self.tls.authority)
        self._say(f"SuperLink: https://{LOOPBACK}:{self.port}, SuperNodes need a key")
        self.processes |= self.runtime.start_servers(self.port, self.server, self.tls)
        self.register_parties()
        for name in self.parties:
            self.start_party(name)

    def register_parties(self) -> None:
        """Make a key for each party and register its public half."""
        commands = {}
        for name in self.parties:
            self._keys[name] = make_key_pair(self.folder / name / "keys", name)
            key = str(self._keys[name].with_suffix(".pub"))
            command = ["flwr", "supernode", "register", key, CONNECTION, "--name", name]
            commands[name] = self.runtime.start(command)
        for name, process in commands.items():
            said, _ = process.communicate(timeout=_START)
            if process.returncode:
                raise VerticalError(f"the key of '{name}' was refused:\n{plain(said)}")
            self._say(f"{name}: its public key is registered")

    def start_party(self, name: str) -> None:
        """Start a party's SuperNode."""
        if self.is_running(name):
            raise ConfigError(f"the SuperNode of '{name}' is running already")
        party = self.parties[name]
        node_config = self.folder / name / "node.toml"
        values: dict[str, ConfigValue] = {"role": party.role, "name": name}
        values |= {"data": str(party.data), "state-dir": str(self.state_dir(name))}
        if party.role == "label":  # here it runs the server as well
            values["trust-server"] = True
        flower_runtime.write_settings(node_config, values)
        log = self._log_file(name)
        command = [
            *("env", f"FLWR_HOME={log.parent / 'flower'}"),  # one for each party
            "flower-supernode",
            *("--superlink", f"{LOOPBACK}:{self.port}"),
            *("--root-certificates", str(self.tls.authority)),
            *("--auth-supernode-private-key", str(self._keys[name])),
            *("--node-config", str(node_config)),
            *("--host", LOOPBACK, "--port", str(flower_runtime.free_port())),
        ]
        self.processes[name] = self.runtime.start_logged(command, log)
        self._say(f"{name}: SuperNode, {party.role} party, data {party.data.name}")

    def stop_party(self, name: str) -> None:
        """Stop a party's SuperNode as its operator would, and wait for its end."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End every process of the deployment."""
        # The parties first, so that they can sign off at the SuperLink.
        for name in self.parties:
            if self.is_running(name):
                self.processes[name].send_signal(signal.SIGTERM)
        end = time.monotonic() + _STOP / 2
        while any(map(self.is_running, self.parties)) and time.monotonic() < end:
            time.sleep(_POLL)
        self.runtime.stop()

    def is_running(self, name: str) -> bool:
        """Return whether a process is running."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def state_dir(self, name: str) -> Path:
        """Return the folder of a party's checkpoints."""
        return self.folder / name / "state"

    def log(self, name: str) -> str:
        """Return the log of a process, across restarts."""
        path = self._log_file(name)
        return plain(path.read_text(errors="replace")) if path.exists() else ""

    def submit(self, settings: Mapping[str, ConfigValue]) -> int:
        """Submit the app with ``flwr run`` and return the id of the run."""
        files = {"certificate": self.tls.certificate, "private-key": self.tls.key}
        files["root-certificate"] = self.tls.authority
        secured = {name: str(path) for name, path in files.items()}
        file = self.server / "run.toml"
        flower_runtime.write_settings(file, {**secured, **settings})
        command = ["flwr", "run", str(APP), CONNECTION, "--run-config", str(file)]
        command += ["--format", "json"]
        process = self.runtime.start(command, errors=subprocess.PIPE)
        said, complaint = process.communicate(timeout=_START)
        try:
            return int(json.loads(said)["run-id"])
        except (ValueError, KeyError, TypeError) as error:
            text = plain(said + complaint)
            raise VerticalError(f"flwr run refused the app:\n{text}") from error

    def follow(self, run_id: int, on_line: Callable[[str], None]) -> None:
        """Show the log of a run until it ends."""
        command = ["flwr", "log", str(run_id), CONNECTION, "--stream"]
        for line in self.runtime.lines(self.runtime.start(command), Deadline(None)):
            on_line(line)

    def status(self, run_id: int) -> tuple[str, str]:
        """Return the status of a run and Flower's details about it."""
        for run in self.runtime.list_runs(Deadline(_START)):
            if int(run["run-id"]) == run_id:
                return str(run["status"]), plain(str(run["status-details"]))
        raise VerticalError(f"the SuperLink has no run {run_id}")

    def _log_file(self, name: str) -> Path:
        if name in self.parties:
            return self.folder / name / "supernode.log"
        return self.server / f"{name}.log"
