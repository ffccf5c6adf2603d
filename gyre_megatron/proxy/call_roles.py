"""Which role a call plays in its execution, by declarative rules per harness.

Rules read headers, the request's structure and short markers. The first rule that matches decides;
a call that none matches is `main`. Auxiliary calls (titles, classifiers, quota probes) never train.
A profile of your own is a function of (request, headers), named under
`rollout.proxy.harness_profile` as `module:function`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from gyre_megatron.config.rollout import CallRole
from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.text.conversation import CallRequest

MAIN = "main"
MAIN_SUMMARY = "main_summary"
SUB_AGENT = "sub_agent"
SUB_AGENT_SUMMARY = "sub_agent_summary"
AUXILIARY = "auxiliary"
CALL_ROLES: tuple[str, ...] = get_args(CallRole)

CallRoleProfile = Callable[[CallRequest, Mapping[str, str]], str]


@dataclass(frozen=True)
class Mark:
    """One sign in a request; every part that is given must hold.

    Attributes:
        headers: Header name (lower case) to a pattern its value must contain.
        system: Pattern in the system text.
        last_user: Pattern in the text of the last user message.
        has_tools: Whether tools are offered.
        max_messages: At most so many messages besides system text.
        max_system: At most so many characters of system text.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    last_user: str | None = None
    has_tools: bool | None = None
    max_messages: int | None = None
    max_system: int | None = None

    def matches(self, request: CallRequest, headers: Mapping[str, str]) -> bool:
        """Whether every given part holds."""
        if any(
            not re.search(pattern, headers.get(name, "")) for name, pattern in self.headers.items()
        ):
            return False
        if self.has_tools is not None and self.has_tools != bool(request.tools):
            return False
        turns = [message for message in request.messages if message["role"] != "system"]
        if self.max_messages is not None and len(turns) > self.max_messages:
            return False
        return self._texts_match(request, turns)

    def _texts_match(self, request: CallRequest, turns: list[dict[str, Any]]) -> bool:
        system = _raw_system(request)
        if self.max_system is not None and len(system) > self.max_system:
            return False
        if self.system is not None and not re.search(self.system, system):
            return False
        if self.last_user is None:
            return True
        last = turns[-1] if turns else {}
        return last.get("role") == "user" and re.search(self.last_user, last["content"]) is not None


@dataclass(frozen=True)
class Profile:
    """Rules of one harness: a call is auxiliary, or (sub-agent or main) times (summary or not)."""

    auxiliary: tuple[Mark, ...] = ()
    sub_agent: tuple[Mark, ...] = ()
    summary: tuple[Mark, ...] = ()

    def role_of(self, request: CallRequest, headers: Mapping[str, str]) -> str:
        """The role; header names are lower case."""
        if _any(self.auxiliary, request, headers):
            return AUXILIARY
        summary = _any(self.summary, request, headers)
        if _any(self.sub_agent, request, headers):
            return SUB_AGENT_SUMMARY if summary else SUB_AGENT
        return MAIN_SUMMARY if summary else MAIN


_CLAUDE_CODE = Profile(
    auxiliary=(
        Mark(headers={"x-claude-code-request-class": r"^auxiliary$"}),
        Mark(
            headers={"x-claude-code-session-id": r"."},
            has_tools=False,
            max_messages=1,
            max_system=6000,
        ),
        Mark(
            headers={"x-claude-code-session-id": r"."},
            has_tools=False,
            system=r"(?i)\btitle\b|\bclassif",
        ),
    ),
    sub_agent=(
        Mark(headers={"x-claude-code-agent-id": r"."}),
        Mark(headers={"x-claude-code-request-class": r"^(subagent|workflow)$"}),
        Mark(system=r"\bcc_is_subagent=true\b"),
    ),
    summary=(
        Mark(headers={"x-claude-code-request-class": r"^compaction$"}),
        Mark(
            headers={"x-claude-code-session-id": r"."},
            last_user=r"(?is)\btext only\b.{0,400}\btools?\b.*\bdetailed summary\b",
        ),
    ),
)

_CODEX = Profile(
    sub_agent=(
        Mark(headers={"x-openai-subagent": r"(?i)^(?!compact|review$).+"}),
        Mark(headers={"x-codex-parent-thread-id": r"."}),
        Mark(
            headers={
                "x-codex-turn-metadata": r"\"(thread_source|session_source)\"\s*:\s*\"subagent"
            }
        ),
    ),
    summary=(
        Mark(headers={"x-openai-subagent": r"(?i)^compact$"}),
        Mark(headers={"x-codex-turn-metadata": r"\"request_kind\"\s*:\s*\"compact"}),
        Mark(last_user=r"(?is)\bCONTEXT CHECKPOINT COMPACTION\b"),
    ),
)

_MINI_SWE_AGENT = Profile()

PROFILES: dict[str, Profile] = {
    "claude_code": _CLAUDE_CODE,
    "codex": _CODEX,
    "mini_swe_agent": _MINI_SWE_AGENT,
    "generic": Profile(
        auxiliary=(*_CLAUDE_CODE.auxiliary, Mark(headers={"x-gyre-role": r"^auxiliary$"})),
        sub_agent=(
            *_CLAUDE_CODE.sub_agent,
            *_CODEX.sub_agent,
            Mark(headers={"x-gyre-role": r"^sub_agent"}),
        ),
        summary=(
            *_CLAUDE_CODE.summary,
            *_CODEX.summary,
            Mark(headers={"x-gyre-role": r"_summary$"}),
        ),
    ),
}


CALL_ROLE_PROFILES: ExtensionPoint[CallRoleProfile] = ExtensionPoint(
    key="rollout.proxy.harness_profile",
    parameters=("request", "headers"),
    builtin={name: profile.role_of for name, profile in PROFILES.items()},
    returns=" | ".join(CALL_ROLES),
)


def call_role_of(profile: CallRoleProfile, request: CallRequest, headers: Mapping[str, str]) -> str:
    """The role that a profile gives to a call.

    Args:
        headers: Names are lower case.

    Raises:
        ConfigError: a profile of somebody's own gave what is no role.
    """
    role = profile(request, headers)
    if role not in CALL_ROLES:
        raise ConfigError(
            f"{CALL_ROLE_PROFILES.key} gave a call the role {role!r}; expected one of "
            f"{', '.join(CALL_ROLES)}"
        )
    return role


def _any(marks: tuple[Mark, ...], request: CallRequest, headers: Mapping[str, str]) -> bool:
    return any(mark.matches(request, headers) for mark in marks)


def _raw_system(request: CallRequest) -> str:
    """System text as sent, attribution lines included: they carry marks."""
    if request.system_text:
        return request.system_text
    leading = request.messages[:1]
    return "".join(message["content"] for message in leading if message["role"] == "system")
