"""What is known about a model when its rules are read, and the small expressions in which rules ask for it.

Expressions are integer arithmetic over what a checkpoint tells: ``hidden``, ``args.num_attention_heads * head``,
``args.kv_channels or hidden // heads``, ``own(0) == 2 * sibling('mlp.dense_4h_to_h.weight', 1)``, ``has('swiglu')``,
``[0, 1, 3][n]``.
Nothing is executed: the syntax tree is walked, and anything else is refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import ConfigError, MismatchError, advise
from .layout import Shape
from .regex import compile_regex

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class UnknownError(LookupError):
    """An expression asks for something that nothing tells; its arguments are what, by name or in words."""

    @property
    def advice(self) -> str:
        """How a user tells it."""
        if not all(name.isidentifier() for name in self.args):
            return "write numbers"
        given = ", ".join(f'"{name}": <number>' for name in self.args)
        return f'set "patterns": {{"variables": {{{given}}}, …}}'

    @property
    def need(self) -> str:
        """What is asked for, and how a user tells it."""
        return f"needs {' and '.join(self.args)}, which the checkpoint does not tell; {self.advice}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What expressions may ask for.

    Attributes:
        args: arguments of the training script as the checkpoint keeps them (``args.hidden_size``).
        model: configuration of the live model, where it is one of transformers (``model.num_attention_heads``).
        hints: other plain values of the checkpoint (``checkpoint_version``).
        shapes: local shapes of all parameters on tensor-parallel rank 0, of either side.
        variables: name → expressions; all that can be told must agree.
        values: names that are numbers already (``total``, ``rest``).
        name, stem: the parameter in question, and the part of its name that the prefix matched.
        measured: what ``shape(…)`` has found so far; it looks at all parameters.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    variables: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    stem: str = ""
    measured: dict[tuple[str, int], int] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, hints: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[Shape]]) -> Facts:
        """What a checkpoint tells.

        Args:
            hints: its own; the training script's arguments are ``args`` of them.
            shapes: local ones by tensor-parallel rank.
        """
        args = (hints or {}).get("args")
        first = {name: each[0] for name, each in shapes.items()}
        return cls(args=args if isinstance(args, Mapping) else {}, hints=hints or {}, shapes=first)

    def evaluate(self, expression: str | int) -> Any:
        """Value of an expression.

        Raises:
            UnknownError: nothing tells it.
            ConfigError: it is not an expression.
            MismatchError: what tells it disagrees.
        """
        if isinstance(expression, (int, float)):
            return expression
        return self._walk(_parse(expression), expression)

    def is_true(self, condition: str | int) -> bool:
        """Whether a condition holds; not where nothing tells it."""
        try:
            return bool(self.evaluate(condition))
        except UnknownError:
            return False

    def _walk(self, node: ast.expr, text: str) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
            return node.value
        if isinstance(node, ast.Name):
            return self._find_name(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("args", "model"):
            return self._find_argument(node.value.id, node.attr)
        kind, left, right = _read_operation(node)
        if kind in _ARITHMETIC:
            return self._calculate(kind, left, right, text)
        if isinstance(node, ast.BoolOp):
            return self._choose(node, text)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.List):
            return self._pick(node.value.elts, self._walk(node.slice, text), text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, [self._walk(each, text) for each in node.args], text)
        raise ConfigError(f"patterns: {ast.unparse(node)!r} in {text!r} is not understood")

    def _calculate(self, kind: type[ast.AST], left: ast.expr, right: ast.expr, text: str) -> Any:
        first, second = self._walk(left, text), self._walk(right, text)
        try:
            return _ARITHMETIC[kind](first, second)
        except (TypeError, ZeroDivisionError) as error:
            raise MismatchError(f"{text!r} with {first!r} and {second!r}: {error}") from None

    def _pick(self, listed: Sequence[ast.expr], number: Any, text: str) -> Any:
        if type(number) is not int or not 0 <= number < len(listed):
            raise MismatchError(f"{text!r} lists {len(listed)}, of which {number!r} is none; the first one is 0")
        return self._walk(listed[number], text)

    def _choose(self, node: ast.BoolOp, text: str) -> Any:
        """``a or b``: the first that can be told. ``a and b``: both true."""
        if isinstance(node.op, ast.And):
            return all(self._walk(each, text) for each in node.values)
        for each in node.values[:-1]:
            try:
                return self._walk(each, text)
            except UnknownError:
                continue
        return self._walk(node.values[-1], text)

    def _find_argument(self, side: str, key: str) -> Any:
        value = (self.args if side == "args" else self.model).get(key)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]  # Megatron-DeepSpeed keeps --num-experts as a list
        if value is None:
            raise UnknownError(f"{side}.{key}")
        return value

    def _find_name(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.variables:
            if self.hints.get(name) is not None and not isinstance(self.hints[name], Mapping):
                return self.hints[name]
            raise UnknownError(name)
        # A variable that asks for itself is not told by that expression.
        inner = replace(self, variables={key: told for key, told in self.variables.items() if key != name})
        found: dict[Any, str] = {}
        for expression in self.variables[name]:
            try:
                found.setdefault(inner.evaluate(expression), str(expression))
            except UnknownError:
                continue
        if len(found) > 1:
            told = ", ".join(f"{value} by {text}" for value, text in found.items())
            raise MismatchError(f"the checkpoint contradicts itself about {name}: {told}")
        if not found:
            raise UnknownError(name)
        return next(iter(found))

    def _call(self, function: str, arguments: Sequence[Any], text: str) -> int:
        try:
            match function, *arguments:
                case "own", dim:
                    return self._measure(self.name, dim)
                case "sibling", suffix, dim:
                    return self._measure(self.stem + suffix, dim)
                case "shape", expression, dim:
                    return self._measure_all(expression, dim)
                case "has", key:  # which release of the script saved
                    if not self.args:
                        raise UnknownError("args")
                    return key in self.args
        except TypeError as error:
            raise ConfigError(f"patterns: {function} in {text!r} has arguments of another kind: {error}") from None
        advice = advise(function, ("own", "sibling", "shape", "has"))
        raise ConfigError(f"patterns: unknown function {function!r} in {text!r}. {advice}")

    def _measure(self, name: str, dim: int) -> int:
        shape = self.shapes.get(name)
        if shape is None or dim >= len(shape):
            raise UnknownError(f"dimension {dim} of {name}")
        return shape[dim]

    def _measure_all(self, expression: str, dim: int) -> int:
        if (expression, dim) in self.measured:
            return self.measured[expression, dim]
        regex = compile_regex(expression)
        found = {self._measure(name, dim) for name in self.shapes if regex.fullmatch(name)}
        if len(found) > 1:
            raise MismatchError(f"parameters {expression!r} differ in dimension {dim}: {sorted(found)}")
        if not found:
            raise UnknownError(f"a parameter {expression!r}")
        self.measured[expression, dim] = found.pop()
        return self.measured[expression, dim]


def _read_operation(node: ast.expr) -> tuple[Any, Any, Any]:
    """The kind of an operation of two sides, and these; None of anything else."""
    if isinstance(node, ast.BinOp):
        return type(node.op), node.left, node.right
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return type(node.ops[0]), node.left, node.comparators[0]
    return None, None, None


@lru_cache(maxsize=1 << 10)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise ConfigError(f"patterns: {expression!r} is not an expression") from None
