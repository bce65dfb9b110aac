"""Records (named tuples) as JSON, between controller, agents and ranks; reading checks values by annotations."""

from typing import Any, TypeVar

Record = TypeVar("Record")


class FieldError(ValueError):
    """A field whose value has another type than its annotation says; ``field`` is its path (``limits.open_files``)."""

    def __init__(self, field: str, value: Any, wanted: str) -> None:
        super().__init__(f"{field} = {value!r} in place of {wanted}")
        self.field, self.value, self.wanted = field, value, wanted


def as_json(value: Any) -> Any:
    """Turn records, and lists and dicts of them, into objects and lists for ``json.dumps``."""
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_json(kind: "type[Record]", value: Any, path: str = "") -> Record:
    """Read a record, with the records in it, from JSON; absent fields have their defaults, unknown ones are ignored.

    Types may be str, int, float, bool, Any, records, Optional, tuples, and dicts with str as keys. Raises FieldError.
    """
    if not isinstance(value, dict):
        raise FieldError(path or kind.__name__, value, "object")
    defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    fields = {
        name: _read(annotation, value.get(name), f"{path}.{name}" if path else name)
        for name, annotation in kind.__annotations__.items()
        if name in value or name not in defaults
    }
    return kind(**fields)


def _read(annotation: Any, value: Any, path: str) -> Any:
    """Convert a JSON value to the type of its annotation. ``path``: of the field, for the error."""
    items: tuple[Any, ...] = getattr(annotation, "__args__", ())
    if type(None) in items:  # Optional[X]
        return None if value is None else _read(items[0], value, path)
    if hasattr(annotation, "_fields"):  # a record
        return from_json(annotation, value, path)
    if items and issubclass(annotation.__origin__, tuple):
        _check(value, list, path)
        # tuple[X, ...] has any length, tuple[X, Y] one value for each type
        kinds = [items[0]] * len(value) if items[-1] is Ellipsis else items
        if len(kinds) != len(value):
            raise FieldError(path, value, f"list of {len(kinds)}")
        return tuple(_read(kinds[number], item, f"{path}.{number}") for number, item in enumerate(value))
    if items:  # dict[str, X]
        _check(value, dict, path)
        return {name: _read(items[1], item, f"{path}.{name}") for name, item in value.items()}
    if annotation is Any:
        return value
    _check(value, annotation, path)
    return float(value) if annotation is float else value


def _check(value: Any, kind: type, path: str) -> None:
    """Raise FieldError if the value isn't of this kind."""
    kinds = {float: (float, int), list: (list, tuple)}.get(kind, (kind,))  # JSON may write 2.0 as 2
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):  # bool is a subclass of int
        raise FieldError(path, value, "object" if kind is dict else kind.__name__)
