"""Codecs against hand-worked values, their error bounds, and bytes that nobody made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.codecs import CODECS, Codec, Encoder, build_codec
from flower_vfl.randomness import generator
from flower_vfl.strategies import Compression, VerticalStrategy

SPECS = ["float16", "bfloat16", "int8", "int4", "int2", "topk:keep=0.3", "topk:keep=1"]
AT = ("shop", "its embedding", 3)


def codec_of(text: str) -> Codec:
    codec = build_codec(text)
    assert codec is not None
    return codec


def rows_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def floats(*numbers: float) -> list[int]:
    return list(torch.tensor(numbers).view(torch.uint8))


def test_int8_by_hand() -> None:
    rows = rows_of([254.0, -2.0, 3.0], [0.0, 0.0, 0.0])  # the scale is 254 / 127 = 2
    encoded = codec_of("int8").encode(rows)
    assert encoded.tolist() == [
        [*floats(2.0), 254, 126, 129],  # 127 more; 3 / 2 is rounded up
        [*floats(0.0), 127, 127, 127],
    ]
    decoded = codec_of("int8").decode(encoded, 3)
    assert decoded.tolist() == [[254.0, -2.0, 4.0], [0.0, 0.0, 0.0]]


def test_several_entries_in_a_byte_by_hand() -> None:
    four, two = codec_of("int4"), codec_of("int2")
    encoded = four.encode(rows_of([14.0, -2.0, 3.0]))  # the scale is 14 / 7 = 2
    assert encoded.tolist() == [[*floats(2.0), 14 | 6 << 4, 9]]
    assert four.decode(encoded, 3).tolist() == [[14.0, -2.0, 4.0]]
    encoded = two.encode(rows_of([-3.0, 1.0, 2.0, 3.0, -2.0]))
    assert encoded.tolist() == [[*floats(3.0), 0 | 1 << 2 | 2 << 4 | 2 << 6, 0]]
    assert two.decode(encoded, 5).tolist() == [[-3.0, 0.0, 3.0, 3.0, -3.0]]


def test_top_k_by_hand() -> None:
    rows = rows_of([1.0, -5.0, 0.5, 4.0], [0.0, 0.0, 0.0, -1.0])
    encoded = codec_of("topk:keep=0.5").encode(rows)
    assert encoded[0].tolist() == [*floats(-5.0, 4.0), 1, 0, 3, 0]
    decoded = codec_of("topk:keep=0.5").decode(encoded, 4)
    assert decoded.tolist() == [[0.0, -5.0, 0.0, 4.0], [0.0, 0.0, 0.0, -1.0]]


def test_low_rank_against_a_singular_value_decomposition() -> None:
    rows = torch.randn(40, 8, generator=generator(3)) * torch.logspace(0, -6, 8)
    left = torch.linalg.svdvals(rows)
    for rank in (1, 3, 9):
        codec = codec_of(f"lowrank:rank={rank}")
        encoded = codec.encode(rows)
        assert encoded.shape == (48, 4 * min(rank, 8))
        error = float((codec.decode(encoded, 8) - rows).norm())
        assert error <= 1.01 * float(left[rank:].norm()) + 1e-5
    few = rows[:2] * 1e-25  # fewer rows than the rank, and squares that vanish
    codec = codec_of("lowrank:rank=3")
    error = (codec.decode(codec.encode(few), 8) - few).abs().max()
    assert float(error) <= 1e-5 * float(few.abs().max())


def test_half_precision_by_hand() -> None:
    rows = rows_of([1.0 + 2**-11 + 2**-20, -1e6, 1e-9])
    sixteen = codec_of("float16").decode(codec_of("float16").encode(rows), 3)
    assert sixteen.tolist() == [[1.0 + 2**-10, -65504.0, 0.0]]  # its range ends there
    brain = codec_of("bfloat16").decode(codec_of("bfloat16").encode(rows), 3)
    assert brain.tolist() == [[1.0, -999424.0, pytest.approx(1e-9, rel=2**-8)]]


@pytest.mark.parametrize("text", SPECS)
def test_size_is_what_is_sent(text: str) -> None:
    for width in (1, 7, 16):
        assert codec_of(text).encode(torch.randn(5, width)).shape[1] == codec_of(
            text
        ).size(width)


def test_indices_beyond_two_bytes() -> None:
    rows = torch.zeros(2, 40_000)
    rows[:, [7, 39_999]] = 2.0
    codec = codec_of("topk:keep=0.00005")
    assert torch.equal(codec.decode(codec.encode(rows), 40_000), rows)


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7), ("int2", 1)])
def test_integers_are_unbiased_and_within_one_scale(name: str, largest: int) -> None:
    rows = torch.randn(4, 50, generator=generator(1)) * rows_of([1e-6, 1.0, 1e6, 3.0]).T
    codec, scale = codec_of(name), rows.abs().amax(1, keepdim=True) / largest
    draws = 500
    found = torch.zeros_like(rows)
    for number in range(draws):
        decoded = codec.decode(codec.encode(rows, generator(number)), 50)
        assert bool(((decoded - rows).abs() <= scale * (1 + 1e-5)).all())
        found += decoded / draws
    # An entry is one of two neighbours, so a mean deviates by 0.5 scale / sqrt(draws).
    assert float(((found - rows) / scale).abs().max()) < 5 * 0.5 / draws**0.5


def test_error_feedback_sends_everything_in_the_end() -> None:
    encoder = Encoder(codec_of("topk:keep=0.2,feedback=true"), 0, "gradient")
    wanted, sent = torch.zeros(10, 6), torch.zeros(10, 6)
    for step in range(30):
        rows = torch.randperm(10, generator=generator("rows", step))[:4]
        batch = torch.randn(4, 6, generator=generator("batch", step))
        encoded = encoder.encode(batch, "shop", step, rows)
        wanted[rows] += batch
        sent[rows] += encoder.codec.decode(encoded, 6)
    left = encoder.state_dict()["shop"]
    torch.testing.assert_close(sent + left, wanted)
    assert float(left.abs().max()) > 0.5  # there was something to remember


def test_encoders_repeat_a_step_and_only_that_step() -> None:
    batch = torch.randn(8, 6, generator=generator(0))

    def sent(seed: int, party: str, step: int, way: str = "gradient") -> Tensor:
        return Encoder(codec_of("int8"), seed, way).encode(batch, party, step, None)  # type: ignore[arg-type]

    first = sent(1, "shop", 2)
    assert torch.equal(first, sent(1, "shop", 2))
    others = [sent(2, "shop", 2), sent(1, "bank", 2), sent(1, "shop", 3)]
    others.append(sent(1, "shop", 2, "embedding"))
    assert not any(torch.equal(first, other) for other in others)


def test_what_is_sent_must_be_finite() -> None:
    encoder = Encoder(codec_of("float16"), 0, "embedding")
    with pytest.raises(PartyError, match="party 'shop', step 4: its embedding has 1"):
        encoder.encode(rows_of([1.0, float("inf")]), "shop", 4, None)


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("int8", torch.zeros(2, 6, dtype=torch.uint8)),  # a byte too few
        ("int8", torch.zeros(2, 7)),
        ("int8", torch.zeros(14, dtype=torch.uint8)),
        ("int8", torch.zeros((), dtype=torch.uint8)),
        ("int8", torch.tensor([[*floats(float("nan")), 1, 1, 1]], dtype=torch.uint8)),
        ("int8", torch.tensor([[*floats(-1.0), 1, 1, 1]], dtype=torch.uint8)),
        ("int8", torch.tensor([[*floats(1.0), 1, 1, 255]], dtype=torch.uint8)),
        ("int2", torch.tensor([[*floats(1.0), 3 << 4]], dtype=torch.uint8)),
        ("topk:keep=0.5", torch.tensor([[*[0] * 8, 1, 0, 1, 0]], dtype=torch.uint8)),
        ("topk:keep=0.5", torch.tensor([[*[0] * 8, 1, 0, 3, 0]], dtype=torch.uint8)),
        ("topk:keep=0.5", torch.tensor([[*[0] * 8, 0, 255, 1, 0]], dtype=torch.uint8)),
        ("lowrank", torch.zeros(2, 4, dtype=torch.uint8)),  # no directions
        ("lowrank", torch.tensor([floats(float("inf"))] * 4, dtype=torch.uint8)),
        ("float16", torch.zeros(2, 3, dtype=torch.float16)),
    ],
)
def test_malformed_encodings_name_party_and_step(text: str, encoded: Tensor) -> None:
    with pytest.raises(PartyError, match="party 'shop', step 3: its embedding"):
        codec_of(text).read(encoded, (3,), *AT)


@settings(max_examples=200, deadline=None)
@given(
    text=st.sampled_from(SPECS),
    data=st.binary(max_size=60),
    columns=st.integers(1, 12),
    shape=st.sampled_from([(3,), (1,), (2, 2)]),
)
def test_any_bytes_are_decoded_or_refused(
    text: str, data: bytes, columns: int, shape: tuple[int, ...]
) -> None:
    whole = len(data) - len(data) % columns
    encoded = torch.tensor(list(data[:whole]), dtype=torch.uint8).reshape(-1, columns)
    try:
        found = codec_of(text).read(encoded, shape, *AT)
    except PartyError as error:
        assert (error.party, error.step) == ("shop", 3)
    else:
        assert found.shape == (len(encoded), *shape) and found.dtype == torch.float32


def test_unknown_codecs_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(sorted(CODECS))):
        VerticalStrategy(compression="zip")
    with pytest.raises(ConfigError, match="keep must be above 0"):
        Compression(gradients="topk:keep=0")
    assert Compression("none", "none") == Compression()
