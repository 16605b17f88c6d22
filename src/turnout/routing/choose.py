"""Choose a route, in one pure function, by the order of authority: pin, preferred by a distributed model,
measured here, measured and shipped, cost model, reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from turnout.routing.device import Device
from turnout.routing.settings import LEVELS, Preference

if TYPE_CHECKING:
    from turnout.routing.op import Op
    from turnout.routing.route import Route
    from turnout.routing.table import Measurement

REFERENCE = "reference"

# A route is taken only when it beats the reference by this ratio; below it the two are tied, and ties go to
# the reference.
MEASURED_MARGIN = 1.03  # run-to-run spread of medians on the H200 is 1 to 2 %
# Microseconds by which it must win on a GPU too: where the host is the limit, times move by 1 with its speed.
MEASURED_US = 2.0
MODEL_MARGIN = 1.15  # costs are estimates


class Refused(ValueError):
    """A pinned route cannot take this call."""


@dataclass(frozen=True)
class Verdict:
    """The answer of `explain`: the chosen route, who decided, what each would cost, why some cannot run.

    chosen: the route's name. authority: who decided, such as "pin" or "model". why: the reason in words.
    microseconds: of each route; None where there is no estimate. measured: the routes whose time was measured
    and not estimated. refused: the reasons of each route that cannot take the call.
    """

    op: str
    problem: Any
    device: Device
    chosen: str
    authority: str
    why: str
    config: Mapping[str, Any] = field(default_factory=dict)
    microseconds: Mapping[str, float | None] = field(default_factory=dict)
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()

    def __str__(self) -> str:
        fields = [f"{name}={plain(value)}" for name, value in self.problem._asdict().items()]
        lines = [
            _wrapped(f"{self.op}(", fields, ")"),
            f"  device  {self.device.name}",
            f"  chosen  {self.chosen} ({self._reason()})",
        ]
        if self.config:
            lines.append(f"  config  {', '.join(f'{k}={v}' for k, v in self.config.items())}")
        width = max(map(len, self.microseconds))
        lines.append("  routes")
        lines += [f"    {route:<{width}}  {self._state(route)}" for route in self.microseconds]
        return "\n".join(lines)

    def _reason(self) -> str:
        """Who decided, and why; the reference needs nobody to decide for it."""
        if self.authority == REFERENCE:
            return self.why
        return f"{'cost model' if self.authority == 'model' else self.authority}: {self.why}"

    def _state(self, route: str) -> str:
        """A route's time, or its reasons to refuse the call."""
        us = self.microseconds[route]
        if self.refused.get(route):
            return "refused: " + "; ".join(self.refused[route])
        if us is None:
            return "no estimate"
        return f"{us:.1f} us {'measured' if route in self.measured else 'estimated'}"

    def json(self) -> str:
        """The verdict as one JSON object, for bug reports."""
        return json.dumps(
            {
                "op": self.op,
                "problem": {k: plain(v) for k, v in self.problem._asdict().items()},
                "device": self.device.name,
                "chosen": self.chosen,
                "authority": self.authority,
                "why": self.why,
                "config": dict(self.config),
                "us": dict(self.microseconds),
                "refused": {k: list(v) for k, v in self.refused.items()},
            }
        )


def _wrapped(head: str, parts: Sequence[str], end: str) -> str:
    """Join parts with commas into lines of at most 100 columns, each below the first part."""
    lines = [head]
    for i, part in enumerate(parts):
        part += end if i == len(parts) - 1 else ","
        if len(lines[-1]) + len(part) >= 100 and lines[-1].strip() not in ("", head):
            lines.append(" " * len(head))
        lines[-1] += part + " "
    return "\n".join(line.rstrip() for line in lines)


def _allowed(level: str) -> str:
    """The numerics classes that a level allows, in words."""
    return " and ".join(LEVELS[: LEVELS.index(level) + 1])


def plain(value: Any) -> Any:
    """Convert a field of a problem to JSON's types: `torch.bfloat16` to "bfloat16", tuples to lists."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return str(value).removeprefix("torch.")


def choose(
    op: Op,
    problem: Any,
    device: Device,
    *,
    pin: str | None = None,
    preferred: Preference | None = None,
    numerics: str = "close",
    measured: Sequence[tuple[str, Measurement]] = (),
    failed: Mapping[str, str] | None = None,
    overhead: float = 0.0,
    blocked_by: str | None = None,
) -> Verdict:
    """Choose the route of one call. A pure function: the same arguments give the same verdict.

    preferred: routes that a distributed model wants to take.
    measured: measurements of this problem from tables, as (authority, measurement), strongest first. failed:
    the routes that failed at launch, with the reason. overhead: seconds that every route costs on top of the
    reference. blocked_by: a reason why no route can take this call; None if there is none.
    """
    if preferred is not None and pin is None and blocked_by is None:
        fastest = choose(
            op, problem, device, numerics=numerics, measured=measured, failed=failed, overhead=overhead
        )
        return _prefer(fastest, preferred, op, measured)
    refused: dict[str, list[str]] = {}
    microseconds: dict[str, float | None] = {}
    timed: set[str] = set()
    for route in op.routes.values():
        reasons = [blocked_by] if blocked_by else list(route.refuses(problem, device))
        if failed and route.name in failed:
            reasons.append(failed[route.name])
        if route.name != pin and LEVELS.index(route.numerics) > LEVELS.index(numerics):
            reasons.append(f"numerics {route.numerics}, the level in force allows {_allowed(numerics)}")
        if reasons:
            refused[route.name] = reasons
        seconds = None if reasons else route.cost(problem, device)
        microseconds[route.name] = None if seconds is None else 1e6 * (seconds + overhead)
    seconds = op.cost(problem, device)
    microseconds[REFERENCE] = None if seconds is None else 1e6 * seconds

    def verdict(chosen: str, authority: str, why: str, config: Mapping[str, Any] | None = None) -> Verdict:
        config, times = config or {}, frozenset(timed)
        return Verdict(op.name, problem, device, chosen, authority, why, config, microseconds, refused, times)

    if pin is not None:
        if pin in refused:
            raise Refused(
                f"{op.name} is pinned to {pin!r}, which refuses {plain_problem(problem)}: "
                f"{'; '.join(refused[pin])}"
            )
        config = None if pin == REFERENCE else _pinned_config(op.routes[pin], problem, device, measured)
        return verdict(pin, "pin", "the caller asked for it", config)
    if blocked_by is not None:
        return verdict(REFERENCE, REFERENCE, blocked_by)
    for authority, measurement in measured:
        times = {
            name: us + 1e6 * overhead
            for name, us in measurement.us.items()
            if name in op.routes and name not in refused
        }
        times[REFERENCE] = measurement.us[REFERENCE]
        microseconds.update(times)
        timed.update(times)
        best = min(times, key=times.__getitem__)
        least = MEASURED_US if device.type == "cuda" else 0.0
        if times[best] * MEASURED_MARGIN >= times[REFERENCE] or times[best] + least >= times[REFERENCE]:
            needed = f"{MEASURED_MARGIN - 1:.0%}" + (f" and {least:g} us" if least else "")
            return verdict(REFERENCE, authority, f"nothing beats it by {needed}, {measurement.note}")
        gain = times[REFERENCE] / times[best]
        return verdict(
            best,
            authority,
            f"{gain:.2f}x as fast as the reference, {measurement.note}",
            measurement.config.get(best),
        )

    estimates = {name: us for name, us in microseconds.items() if us is not None and name not in refused}
    if REFERENCE in estimates and len(estimates) > 1:
        best = min(estimates, key=estimates.__getitem__)
        gain = estimates[REFERENCE] / max(estimates[best], 1e-9)
        if gain > MODEL_MARGIN:
            configs = op.routes[best].configs(problem, device)
            return verdict(
                best,
                "model",
                f"estimated {gain:.2f}x as fast as the reference",
                configs[0] if configs else None,
            )
        return verdict(REFERENCE, "model", f"nothing is estimated to beat it by {MODEL_MARGIN - 1:.0%}")
    all_refused = len(refused) == len(op.routes)
    why = "no other route can take this call" if all_refused else "costs are unknown on this device"
    return verdict(REFERENCE, REFERENCE, why)


def _prefer(
    verdict: Verdict, preferred: Preference, op: Op, measured: Sequence[tuple[str, Measurement]]
) -> Verdict:
    """The fastest of the preferred routes, unless the choice is one of them, none can take the call, or it
    takes much longer than the choice. Those whose time nobody knows come last, and are taken."""
    able = [name for name in preferred.routes if name not in verdict.refused]
    if verdict.chosen in preferred.routes or not able:
        return verdict
    times = verdict.microseconds
    name = min(able, key=lambda name: inf if (us := times.get(name)) is None else us)
    us, least = times.get(name), times.get(verdict.chosen)
    if us is not None and least is not None and us > preferred.margin * least:
        return verdict
    config = _pinned_config(op.routes[name], verdict.problem, verdict.device, measured)
    why = f"it can be cut into parts, which is not known of {verdict.chosen!r}"
    return replace(verdict, chosen=name, authority="preferred", why=why, config=config or {})


def _pinned_config(
    route: Route, problem: Any, device: Device, measured: Sequence[tuple[str, Measurement]]
) -> Mapping[str, Any] | None:
    """The configuration of a pinned route: what was measured for this problem, else the first it offers."""
    for _, measurement in measured:
        if route.name in measurement.config:
            return measurement.config[route.name]
    return next(iter(route.configs(problem, device)), None)


def plain_problem(problem: Any) -> str:
    """Write all fields of a problem, as "name=value, ..."."""
    return ", ".join(f"{k}={plain(v)}" for k, v in problem._asdict().items())


def in_short(problem: Any) -> str:
    """Write a problem for a list that people read: sizes, settings, each dtype once; no strides, no None.

    >>> from turnout.ops.conv2d import CONV2D
    >>> image, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    >>> print(in_short(CONV2D.problem(image, weight, None, [1, 1], [1, 1], [1, 1], 1, None)))
    ... # doctest: +NORMALIZE_WHITESPACE
    input 1x3x8x8, weight 4x3x3x3, float32, stride 1x1, padding 1x1, dilation 1x1, groups 1,
    conv ieee, matmul ieee
    """
    parts, types = [], set()
    for name, value in problem._asdict().items():
        if "strides" in name or value is None or value is False or value == () or value == "":
            continue
        if isinstance(value, torch.dtype):
            parts += [] if value in types else [plain(value)]
            types.add(value)
        elif hasattr(value, "_asdict"):
            inner = in_short(value)
            if inner and name in ("cache", "residual"):
                inner = f"{name} {inner.removeprefix('shape ')}"
            parts += [inner] if inner else []
        elif isinstance(value, tuple) and all(isinstance(n, int) for n in value):
            parts.append(f"{name} {'x'.join(map(str, value))}")
        else:
            parts.append(f"{name} {plain(value)}")
    return ", ".join(parts)
