"""What every section of a config has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class FieldError(ValueError):
    """A check across fields that failed, with the field that is to be mended.

    Args:
        field: Dotted name, such as ``training.precision``.
        text: What is wrong and what to do.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class Section(BaseModel):
    """Base of every section: frozen, and a key that is not a field is an error, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes and on as true, and pydantic would take that for the number 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"should not be {str(value).lower()}; a text needs quotes around it")
        return value
