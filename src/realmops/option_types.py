"""Types of options, and the base class of their sections."""

from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST_INTEGER = 2**63 - 1  # maximum of int64 arrays


def _parse_quoted_number(value: Any) -> Any:
    """Return a quoted number as float: YAML 1.1 writers put quotation marks around 1e-05."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


Size = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Number = Annotated[float, BeforeValidator(_parse_quoted_number)]
Amount = Annotated[Number, Field(ge=0)]
PositiveAmount = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]


def option(default: Any, text: str = "", *, paper: str = "") -> Any:
    """Declare an option with its default, its sentence, and the value of Guu et al. (2020) or of its released code."""
    return Field(default, description=text, json_schema_extra={"paper": paper})


class Section(BaseModel):
    """Options of one section."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Sections(BaseModel):
    """Sections with their options, which are named ``section.key``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def get(self, name: str) -> Any:
        """Return the option ``section.key``, or the section ``section``."""
        return attrgetter(name)(self)

    def replace(self, values: Mapping[str, Any]) -> Self:
        """Return the sections with other, valid values of the options ``section.key``."""
        sections: dict[str, BaseModel] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            sections[section] = sections.get(section, self.get(section)).model_copy(update={key: value})
        return self.model_copy(update=sections)
