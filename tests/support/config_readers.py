"""Who reads each field of the configuration, found in the source.

A reader is an expression of the package that takes the field off a value known to be that section:
from annotations of parameters, attributes, properties and results, from what was assigned, and from
what a field of a known class leads to. Field names alone would prove nothing: `timeout_s` belongs
to five sections. A validator checks a field and obeys nothing, so it is no reader. The tiny model
is made by `examples/`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from gyre_megatron.config.base import Section
from gyre_megatron.config.loader import GyreConfig

PACKAGE = Path(inspect.getfile(GyreConfig)).parents[1]
TINY_MODEL = PACKAGE.parent / "examples/tiny_model"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

Field = tuple[str, str]
"""(name of the section's class, name of the field)"""


def sections(root: type[BaseModel] = GyreConfig) -> dict[str, type[BaseModel]]:
    """Every section reachable from `root`, by class name."""
    found: dict[str, type[BaseModel]] = {}
    waiting = [root]
    while waiting:
        section = waiting.pop()
        if section.__name__ not in found:
            found[section.__name__] = section
            waiting += [kind for field in section.model_fields for kind in _inner(section, field)]
    return found


def _inner(section: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """The sections that a field's annotation names."""

    def parts(annotation: object) -> Iterator[object]:
        yield annotation
        for part in typing.get_args(annotation):
            yield from parts(part)

    kinds = parts(section.model_fields[field].annotation)
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)]


def all_fields() -> set[Field]:
    """Every field that holds a value rather than a section."""
    return {
        (name, field)
        for name, section in sections().items()
        for field in section.model_fields
        if not _inner(section, field)
    }


@functools.cache
def package_sources() -> dict[Path, ast.Module]:
    """The package's modules, and those that make the tiny model."""
    files = [*sorted(PACKAGE.rglob("*.py")), *sorted(TINY_MODEL.glob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in files}


def fields_read(extra: Iterable[Path] = (), package: bool = True) -> dict[Field, list[str]]:
    """Each field that is read, with the places (`file:line`) where it is.

    Args:
        extra: files beside the package's.
        package: whether reads in the package count; its classes are known either way.
    """
    sources = package_sources() | {path: ast.parse(path.read_text()) for path in extra}
    types = Types(sources.values())
    found: dict[Field, list[str]] = {}
    for path, tree in sources.items():
        if package or path in extra:
            for field, line in _Reader(types).read(tree):
                found.setdefault(field, []).append(f"{path.name}:{line}")
    return found


class Types:
    """What the source says of its classes: the class of each attribute, property and result.

    Classes go by their names; a name with two definitions in the package is looked up in both, and
    an attribute that they disagree about is unknown.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        trees = list(trees)
        classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        self.classes = {cls.name for cls in classes}
        self._members: dict[tuple[str, str], str | None] = {}
        self._bases = {
            cls.name: [base.id for base in cls.bases if isinstance(base, ast.Name)]
            for cls in classes
        }
        self.results: dict[str, str | None] = {}
        for tree in trees:
            for function in (n for n in tree.body if isinstance(n, FUNCTIONS)):
                self._add(self.results, function.name, self.named(function.returns))
        for cls in classes:
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    self._add(
                        self._members, (cls.name, node.target.id), self.named(node.annotation)
                    )
                elif isinstance(node, FUNCTIONS):
                    self._add(self._members, (cls.name, node.name), self.named(node.returns))
        for _ in range(2):  # an attribute may be made from another class's
            for cls in classes:
                self._add_self_attributes(cls)

    @staticmethod
    def _add(table: dict[typing.Any, str | None], key: object, kind: str | None) -> None:
        table[key] = kind if table.get(key, kind) == kind else None

    def _add_self_attributes(self, cls: ast.ClassDef) -> None:
        """`self.x = <expression>` in any method."""
        for method in (n for n in cls.body if isinstance(n, FUNCTIONS)):
            names = self.arguments(method, {"self": cls.name})
            for node in ast.walk(method):
                for target, value in assignments(node):
                    kind = self.kind(value, names)
                    match target:
                        case ast.Name(id=name) if kind:
                            names[name] = kind
                        case ast.Attribute(value=ast.Name(id="self"), attr=name) if kind:
                            self._members.setdefault((cls.name, name), kind)

    def named(self, annotation: ast.expr | None) -> str | None:
        """The class that an annotation names, alone or in a union; no collection's items."""
        match annotation:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name if name in self.classes else None
            case ast.Constant(value=str() as text):
                return self.named(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right, op=ast.BitOr()):
                return self.named(left) or self.named(right)
        return None

    def arguments(self, function: ast.AST, names: dict[str, str]) -> dict[str, str]:
        """Names inside a function: those around it and its annotated parameters."""
        names = dict(names)
        arguments: ast.arguments = function.args  # type: ignore[attr-defined]
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if arg.arg != "self":
                names.pop(arg.arg, None)
            if kind := self.named(arg.annotation):
                names[arg.arg] = kind
        return names

    def member(self, cls: str, name: str) -> str | None:
        """The class of an attribute, its own or inherited."""
        if (cls, name) in self._members:
            return self._members[cls, name]
        return next(filter(None, (self.member(b, name) for b in self._bases.get(cls, ()))), None)

    def kind(self, value: ast.expr, names: dict[str, str]) -> str | None:
        """The class that an expression is, None where the source does not say."""
        match value:
            case ast.Name(id=name):
                return names.get(name)
            case ast.Attribute(value=base, attr=name):
                owner = self.kind(base, names)
                return self.member(owner, name) if owner else None
            case ast.BoolOp(values=values):
                return next(filter(None, (self.kind(v, names) for v in values)), None)
            case ast.IfExp(body=body, orelse=orelse):
                return self.kind(body, names) or self.kind(orelse, names)
            case ast.Await(value=inner):
                return self.kind(inner, names)
            case ast.Call(func=ast.Name(id=name)):
                return name if name in self.classes else self.results.get(name)
            case ast.Call(func=ast.Attribute(value=base, attr="model_copy")):
                return self.kind(base, names)
            case ast.Call(func=ast.Attribute() as method):
                return self.kind(method, names)
        return None


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) pairs of a statement."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=[target], value=value):
            yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value


class _Reader:
    """Follows classes through one module, scope by scope, in the order of the lines."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._sections = sections()
        self._found: list[tuple[Field, int]] = []

    def read(self, tree: ast.Module) -> list[tuple[Field, int]]:
        self._scope(tree, {})
        return self._found

    def _scope(self, scope: ast.AST, names: dict[str, str]) -> None:
        names = dict(names)
        if isinstance(scope, FUNCTIONS | ast.Lambda):
            names = self._types.arguments(scope, names)
        if isinstance(scope, ast.ClassDef):
            names["self"] = scope.name
        inner: list[ast.AST] = []
        for node in self._in_order(scope, inner):
            self._note(node, names)
            for target, value in assignments(node):
                if isinstance(target, ast.Name):
                    names.pop(target.id, None)
                    if kind := self._types.kind(value, names):
                        names[target.id] = kind
        for child in inner:
            if not _validates(child):
                self._scope(child, names)

    def _in_order(self, scope: ast.AST, inner: list[ast.AST]) -> Iterator[ast.AST]:
        """The nodes of a scope; scopes inside it are put into `inner`."""
        for child in ast.iter_child_nodes(scope):
            if isinstance(child, FUNCTIONS | ast.ClassDef | ast.Lambda):
                inner.append(child)
            else:
                yield child
                yield from self._in_order(child, inner)

    def _note(self, node: ast.AST, names: dict[str, str]) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self._types.kind(node.value, names)
            if owner in self._sections and node.attr in self._sections[owner].model_fields:
                self._found.append(((owner, node.attr), node.lineno))


def _validates(scope: ast.AST) -> bool:
    """Whether a function is a validator of pydantic."""
    decorators = [ast.unparse(d) for d in getattr(scope, "decorator_list", ())]
    return any(text.startswith(("model_validator", "field_validator")) for text in decorators)
