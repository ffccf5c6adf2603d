"""The HTTP face that harnesses call: dialects, forests of executions, call roles; every call
recorded token by token."""

from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.proxy.call_roles import CALL_ROLES
from gyre_megatron.proxy.dialects.base import Answer, Dialect, StreamWriter
from gyre_megatron.proxy.extensions import load_extensions
from gyre_megatron.proxy.standalone import Recording, serve
from gyre_megatron.text.conversation import BadRequest, CallRequest, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

__all__ = [
    "CALL_ROLES",
    "Answer",
    "BadRequest",
    "CallRequest",
    "Dialect",
    "OutputEvent",
    "Recording",
    "StreamWriter",
    "ToolCall",
    "create_proxy_app",
    "load_extensions",
    "serve",
]
