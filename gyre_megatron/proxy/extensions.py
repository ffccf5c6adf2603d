"""What users can bring to the proxy: dialects, call-role profiles and tool formats of their own.

Loaded before a run starts, so that a wrong name never ends one that is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gyre_megatron.config.rollout import ProxyConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.proxy.call_roles import CALL_ROLE_PROFILES, CallRoleProfile
from gyre_megatron.proxy.dialects.anthropic import AnthropicMessages
from gyre_megatron.proxy.dialects.base import Dialect
from gyre_megatron.proxy.dialects.chat import ChatCompletions
from gyre_megatron.proxy.dialects.responses import Responses
from gyre_megatron.text.tool_formats import TOOL_FORMATS

DIALECTS: ExtensionPoint[Callable[[], Dialect]] = ExtensionPoint(
    key="rollout.proxy.dialects",
    parameters=(),
    builtin={"anthropic": AnthropicMessages, "chat": ChatCompletions, "responses": Responses},
    returns="proxy.Dialect",
)


@dataclass(frozen=True)
class ProxyExtensions:
    """What the configuration names, loaded."""

    dialects: tuple[Dialect, ...]
    call_role_profile: CallRoleProfile


def load_extensions(config: ProxyConfig) -> ProxyExtensions:
    """Load every extension that the proxy's configuration names.

    Raises:
        ConfigError: one is unknown, does not import, or does not fill its contract; the message
        names the key.
    """
    TOOL_FORMATS.load(config.tool_call_format)  # used by the renderer, which needs a template
    dialects = tuple(_load_dialect(name) for name in config.dialects)
    paths = Counter(path for d in dialects for path in (*d.paths, *d.count_paths))
    taken = [path for path, count in paths.items() if count > 1]
    if taken:
        raise ConfigError(
            f"{DIALECTS.key}: {', '.join(config.dialects)} serve {', '.join(taken)} twice; leave "
            "one of them out"
        )
    return ProxyExtensions(dialects, CALL_ROLE_PROFILES.load(config.harness_profile))


def _load_dialect(name: str) -> Dialect:
    maker = DIALECTS.load(name)
    try:
        dialect = maker()
    except TypeError as error:  # abstract methods that were left open
        raise ConfigError(f"{DIALECTS.key}: {name} is no dialect yet: {error}") from error
    if not isinstance(dialect, Dialect):
        raise ConfigError(
            f"{DIALECTS.key}: {name} made a {type(dialect).__name__}; derive it from "
            "Dialect, which the proxy package exports"
        )
    missing = [field for field in ("name", "paths") if not getattr(dialect, field, None)]
    if missing:
        raise ConfigError(f"{DIALECTS.key}: {name} does not set {' and '.join(missing)}")
    return dialect
