"""The engine of a run: what all engines share, and the settings of the one that is named.

Written flat, in a sweep and in a record: `{"name": "mfsdp", "strategy": "optim", "allocator":
"max_pool"}`. In Python the engine's own settings are `settings`, of the model in its row.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from pydantic import (
    ConfigDict,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bench.spec.engine_table import (
    IMPORT_PATH,
    SHARED_SETTINGS,
    EngineRow,
    EngineSettings,
    SharedSettings,
    engine_names,
    find_engine,
    known_engine,
    own_settings,
)

Settings = TypeVar("Settings", bound=EngineSettings)


class UnknownSettings(EngineSettings):
    """Settings of an engine that is not installed here, as a record of it has them."""

    model_config = ConfigDict(frozen=True, extra="allow")


class EngineSpec(SharedSettings):
    """The implementation under test.

    settings: the engine's own. foreign: settings in a request that only other engines have, where
    they differ from those engines' defaults; a plan prunes such a cell.
    """

    settings: SerializeAsAny[EngineSettings] = EngineSettings()
    foreign: tuple[tuple[str, Any], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _sort_settings(cls, data: Any) -> Any:
        """Sort flat settings by engine; pydantic refuses what no engine has.

        Raises:
            ValidationError: an engine does not accept the value of its setting.
        """
        if not isinstance(data, dict) or "settings" in data:
            return data
        own, rest = {}, {}
        name = data.get("name", SharedSettings().name)
        row = _row(name, data.get("front")) if isinstance(name, str) else None
        model = UnknownSettings if row is None else row.settings
        is_open = model.model_config.get("extra") == "allow"
        for key, value in data.items():
            if key not in SHARED_SETTINGS and (key in model.model_fields or is_open):
                own[key] = value
            else:
                rest[key] = value
        known = own_settings()
        foreign = []
        for key in [key for key in rest if key in known]:
            value = rest.pop(key)
            if _taken(known[key], key, value) != known[key][0].model_fields[key].default:
                foreign.append((key, value))
        return rest | {"settings": model.model_validate(own), "foreign": tuple(foreign)}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        own = document.pop("settings", {})
        foreign = document.pop("foreign", ())
        flat: dict[str, Any] = document | own | dict(foreign)
        return flat

    @classmethod
    def __get_pydantic_json_schema__(cls, _core_schema: Any, _handler: Any) -> dict[str, Any]:
        """As written in a file: the settings of all engines next to the shared ones."""
        schema = SharedSettings.model_json_schema()
        properties = schema["properties"]
        names = {"enum": list(engine_names())}
        properties["name"]["anyOf"] = [names, {"pattern": f"^{IMPORT_PATH}"}]
        for name, models in own_settings().items():
            every = [model.model_json_schema()["properties"][name] for model in models]
            first = find_engine(properties["name"]["default"])
            if first is not None and name in first.settings.model_fields:
                every.insert(0, first.settings.model_json_schema()["properties"][name])
            properties[name] = _any_of(every)
        return schema | {"title": cls.__name__, "description": cls.__doc__}

    @property
    def row(self) -> EngineRow | None:
        """The engine's row, behind its front; None where it is not installed."""
        return _row(self.name, self.setting("front"))

    @property
    def known_row(self) -> EngineRow:
        """As `row`.

        Raises:
            ConfigError: no engine has this name.
        """
        return self.row or known_engine(self.name)

    def setting(self, name: str) -> Any:
        """The value of one setting, shared or the engine's own; None where it has none."""
        return getattr(self if name in SHARED_SETTINGS else self.settings, name, None)

    def asked(self, name: str) -> Any:
        """The requested value of a setting of any engine, or its default."""
        if name in SHARED_SETTINGS or name in type(self.settings).model_fields:
            return self.setting(name)
        models = own_settings().get(name)
        default = models[0].model_fields[name].default if models else None
        return dict(self.foreign).get(name, default)

    def settings_as(self, model: type[Settings]) -> Settings:
        """The engine's own; the defaults where it is another one that builds on that of `model`."""
        return self.settings if isinstance(self.settings, model) else model()

    def with_settings(self, **changed: Any) -> Self:
        """A copy with some of the engine's own settings changed."""
        return self.model_copy(update={"settings": self.settings.model_copy(update=changed)})


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """The first of `schemas`, widened to accept what any of them accepts."""
    values = dict.fromkeys(value for schema in schemas for value in schema.get("enum", ()))
    return schemas[0] | ({"enum": list(values)} if values else {})


def _row(name: str, front: object) -> EngineRow | None:
    row = find_engine(name)
    return next((other for key, other in row.fronts if key == front), row) if row else None


def _taken(models: tuple[type[EngineSettings], ...], key: str, value: Any) -> Any:
    """`value` as parsed by the first of `models` that accepts it.

    Raises:
        ValidationError: none accepts it.
    """
    refusals: list[ValidationError] = []
    for model in models:
        try:
            return getattr(model.model_validate({key: value}), key)
        except ValidationError as error:
            refusals.append(error)
    raise refusals[0]
