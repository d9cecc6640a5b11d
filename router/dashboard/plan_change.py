"""What a visitor wants of the pools, from the body of their request. What is in it the router judges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.errors import InvalidArgument

_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class PlanChange(BaseModel):
    """The fields of SetPlanRequest in protos/plans.proto, by their names there."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Literal["auto", "manual", "frozen"]
    num_prefill: _Count = 0
    num_decode: _Count = 0
    for_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    dry_run: bool | None = None
    preview: bool = False
    reason: str = Field(default="", max_length=200)

    @staticmethod
    def parse(body: bytes) -> PlanChange:
        """Raises InvalidArgument, which names the field."""
        try:
            return PlanChange.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise InvalidArgument(f"{field or 'the body'}: {first['msg']}", field=field) from None
