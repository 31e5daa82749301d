"""What a party's bottom model takes in: the contract between datasets and models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """The shape of one party's features.

    A bottom model is called as ``model(*inputs)``. For an image the inputs are one
    ``uint8`` tensor (B, C, H, W); for a table they are the numeric columns as
    ``float32`` (B, numeric), if there are any, followed by the categorical columns
    as ``int64`` codes (B, len(cardinalities)), if there are any.
    """

    numeric: int = 0
    cardinalities: tuple[int, ...] = ()
    image: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse a spec that describes nothing or two things at once."""
        table = self.numeric > 0 or bool(self.cardinalities)
        if table == (self.image is not None):
            raise ValueError(
                "an InputSpec describes either a table (numeric and/or categorical "
                f"columns) or an image, got {self!r}"
            )
