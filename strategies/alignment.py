"""The alignment of ids before training: the strategy relays encrypted chunks."""

import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from logging import INFO

from flwr.supercore import log

from flower_vfl.alignment import DEFAULT_GROUP, GROUPS, METHODS, messages
from flower_vfl.alignment.messages import EncryptedChunk, HandshakeConfig, Key, Stage
from flower_vfl.errors import ConfigError, PartyError, PartyRestartedError, check_name
from flower_vfl.protocol.config import PartyDescription, Value
from flower_vfl.protocol.messages import Content, Verb

from .messenger import Messenger, NoReplyError
from .progress import AlignmentProgress

NONE = "none"
ALIGNMENTS = (NONE, *METHODS)
_CHUNKS = 4  # of a full message: the rest of one list leaves room for the next
_DROP_SECONDS = 10.0  # to wait for parties that are told to forget a handshake


@dataclass(frozen=True)
class Alignment:
    """How the ids of the parties are aligned before training.

    Parameters
    ----------
    method : str (default: "none")
        ``"psu"`` trains on the union of all ids (private set union), ``"psi"`` on the
        ids that all parties have (private set intersection). ``"none"`` needs the same
        rows in the same order at every party.
    group : str (default: "ristretto255")
        The group of the exponentiations, one of `flower_vfl.alignment.GROUPS`.
    padding : int (default: 0)
        Dummy ids of each party (`flower_vfl.alignment.padding_delta`).
    relay_bytes : int (default: 16 MiB)
        Most bytes of encrypted lists in one message.

    Examples
    --------
    >>> alignment = Alignment("psu", padding=100)
    >>> alignment.group
    'ristretto255'
    >>> bool(alignment), bool(Alignment())
    (True, False)
    """

    method: str = NONE
    _: KW_ONLY
    group: str = DEFAULT_GROUP
    padding: int = 0
    relay_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        check_name("alignment", self.method, ALIGNMENTS)
        check_name("group", self.group, GROUPS)
        if self.padding < 0:
            raise ConfigError(f"padding must not be negative, got {self.padding}")
        if self.relay_bytes < 1:
            raise ConfigError(f"relay_bytes must be positive, got {self.relay_bytes}")

    def __bool__(self) -> bool:
        """Return whether ids are aligned at all."""
        return self.method != NONE

    def handshake(self, ring: Sequence[str]) -> HandshakeConfig:
        """Return the config of a new handshake."""
        given = self.method, self.group, tuple(ring), self.padding
        chunk = max(1, self.relay_bytes // _CHUNKS)
        return HandshakeConfig(secrets.token_bytes(32), *given, chunk)


class Relay:
    """Queues of encrypted chunks for each party: in order, and few at a time."""

    def __init__(self, ring: Sequence[str], limit: int) -> None:
        self._limit = limit
        self._queues: dict[str, deque[EncryptedChunk]] = {n: deque() for n in ring}
        self._more: set[str] = set()
        self.merged: int | None = None  # size of the merged list, once it is known

    def collect(
        self, sender: str, chunks: Iterable[EncryptedChunk], more: bool
    ) -> None:
        """Queue the chunks that a party has sent."""
        for chunk in chunks:
            header = chunk.header
            if header.sender != sender or header.receiver not in self._queues:
                ends = f"from '{header.sender}' to '{header.receiver}'"
                raise PartyError(sender, f"has sent a chunk {ends}", messages.REMEDY)
            self._queues[header.receiver].append(chunk)
            if header.phase == "union":
                self.merged = header.count
        self._more.discard(sender)
        if more:
            self._more.add(sender)

    def due(self) -> dict[str, list[EncryptedChunk]]:
        """Return what to send next; an empty list asks a party for more."""
        return {
            name: self._next(queue)
            for name, queue in self._queues.items()
            if queue or name in self._more
        }

    def _next(self, queue: deque[EncryptedChunk]) -> list[EncryptedChunk]:
        chunks: list[EncryptedChunk] = []
        size = 0
        while queue and (not chunks or size + len(queue[0].content) <= self._limit):
            chunks.append(queue.popleft())
            size += len(chunks[-1].content)
        return chunks


class Aligner:
    """Aligns the ids of the parties of a run."""

    def __init__(
        self,
        messenger: Messenger,
        alignment: Alignment,
        parties: Sequence[PartyDescription],
        key: bytes,
        progress: bool | None,
    ) -> None:
        self._messenger, self._alignment, self._parties = messenger, alignment, parties
        self._handshake = alignment.handshake([party.name for party in parties])
        self._key, self._progress = key, progress

    def align(self, reuse: bool) -> dict[str, PartyDescription]:
        """Align the rows of all parties and return their new descriptions."""
        if reuse:
            return self._apply(_common_digest(self._parties))
        try:
            return self._apply(self._run_handshake())
        except BaseException:  # parties that can be reached forget the handshake
            drop = Content({Key.STAGE: Stage.DROP.value})
            contents = dict.fromkeys(self._handshake.ring, drop)
            with suppress(Exception):
                self._messenger.tell(Verb.ALIGN, contents, _DROP_SECONDS)
            raise

    def _run_handshake(self) -> str:
        """Return the digest of a new alignment, which all parties confirm."""
        started = time.monotonic()
        replies = self._exchange()
        ring, method = self._handshake.ring, self._handshake.method
        digest, sizes = _outcome(replies[ring[0]])
        for name, reply in replies.items():
            if _outcome(reply) != (digest, sizes):
                problem = f"its outcome of the alignment is not that of '{ring[0]}'"
                raise PartyError(name, problem, messages.REMEDY)
        *counts, aligned = sizes
        listed = ", ".join(f"{n} {c}" for n, c in zip(ring, counts, strict=True))
        seconds = time.monotonic() - started
        log(INFO, "aligned by %s in %.1f s: %d rows", method, seconds, aligned)
        log(INFO, "ids, as all parties and this server now know: %s", listed)
        if not aligned:
            raise ConfigError("the parties have no id in common to train on")
        return digest

    def _exchange(self) -> dict[str, Content]:
        """Relay the chunks of all lists and return the parties' final replies."""
        ring, limit = self._handshake.ring, self._alignment.relay_bytes
        config = messages.pack_handshake(self._handshake)
        begun = self._ask(Stage.BEGIN, dict.fromkeys(ring, config), "keys")
        hellos = [h for reply in begun.values() for h in messages.unpack_hellos(reply)]
        counts = [reply.number(Key.IDS) for reply in begun.values()]
        relay = Relay(ring, limit)
        with AlignmentProgress(counts, self._handshake.method, self._progress) as bar:
            keys = {**messages.pack_hellos(hellos), Key.LIMIT: limit}
            replies = self._ask(Stage.KEYS, dict.fromkeys(ring, keys), "own lists")
            while True:
                for name, reply in replies.items():
                    more = bool(reply.config.get(Key.MORE, False))
                    relay.collect(name, messages.unpack_chunks(reply), more)
                    bar.done(name, reply.number(Key.EXPONENTIATIONS), relay.merged)
                due = relay.due()
                if not due:
                    break
                replies = self._deliver(due)
        ending: dict[str, Value] = {Key.DIGEST_KEY: self._key}
        return self._ask(Stage.FINISH, dict.fromkeys(ring, ending), "end")

    def _deliver(
        self, due: Mapping[str, Sequence[EncryptedChunk]]
    ) -> dict[str, Content]:
        phases = sorted({c.header.phase for chunks in due.values() for c in chunks})
        limit = self._alignment.relay_bytes
        contents: dict[str, dict[str, Value]] = {
            name: {**messages.pack_chunks(chunks), Key.LIMIT: limit}
            for name, chunks in due.items()
        }
        phase = f"{' and '.join(phases)} lists" if phases else "own lists"
        return self._ask(Stage.RELAY, contents, phase)

    def _apply(self, digest: str) -> dict[str, PartyDescription]:
        """Have all parties use an alignment, and return their new descriptions."""
        config = messages.pack_handshake(self._handshake)
        config |= {Key.ALIGNED: digest, Key.DIGEST_KEY: self._key}
        asked = dict.fromkeys(self._handshake.ring, config)
        replies = self._ask(Stage.APPLY, asked, "end")
        found = {}
        for each in self._parties:
            reply = replies[each.name]
            rows, split = reply.number(Key.ROWS), reply.text(Key.SPLIT_DIGEST)
            found[each.name] = replace(
                each, rows=rows, ids_digest=digest, split_digest=split
            )
        return found

    def _ask(
        self, stage: Stage, contents: Mapping[str, Mapping[str, Value]], phase: str
    ) -> dict[str, Content]:
        """Send one request to each named party; an error names the phase."""
        requests = {
            name: Content({**config, Key.STAGE: stage.value})
            for name, config in contents.items()
        }
        try:
            return self._messenger.ask(Verb.ALIGN, requests)
        except PartyError as error:
            problem = f"{error.problem}, while ids were aligned ({phase})"
            remedy = error.remedy
            if isinstance(error, NoReplyError | PartyRestartedError):
                remedy = f"Look at that node's log. {messages.REMEDY}"
            raise PartyError(error.party, problem, remedy) from None


def _outcome(reply: Content) -> tuple[str, list[int]]:
    """Return what must be equal at all parties: the digest and the sizes."""
    return reply.text(Key.ALIGNED), messages.read_list(reply, Key.SIZES, int)


def _common_digest(descriptions: Sequence[PartyDescription]) -> str:
    """Return the digest of the alignment that all parties have saved."""
    first = descriptions[0]
    for party in descriptions:
        if not party.aligned or party.aligned != first.aligned:
            saved = "another" if party.aligned else "no"
            remedy = "Give every node its own state-dir, or start without resume"
            problem = f"has saved {saved} alignment to resume with"
            raise PartyError(party.name, problem, remedy)
    return first.aligned
