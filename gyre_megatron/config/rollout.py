"""The rollout section: proxy, sampling, router, harness, tasks, evaluators and trajectory
processor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gyre_megatron.config.base import InputPath, Section, UserPath

CallRole = Literal["main", "main_summary", "sub_agent", "sub_agent_summary", "auxiliary"]


class SamplingConfig(Section):
    """How calls are sampled, whatever the harness asks for."""

    temperature: float | None = 1.0
    """Sampling temperature of every call; null honours the harness. 1: what training scores as
    well."""
    top_p: float | None = 1.0
    """Nucleus mass of every call; null honours the harness. Default 1: log-probabilities are of the
    full softmax."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Cap on the tokens of one call, also used where a dialect has no limit of its own; null takes
    what the context leaves."""
    return_routed_experts: bool = False
    """Ask the engine for the experts each token took (needs --enable-return-routed-experts)."""


class ProxyConfig(Section):
    """The HTTP face that harnesses talk to."""

    max_request_mib: int = Field(64, gt=0)
    """Larger bodies are refused with 413; one million tokens of history are about 5 MiB."""
    ping_interval_s: float = Field(10.0, gt=0)
    """Silence after which a stream sends a ping; clients give up after about 300 s."""
    context_length: int | None = Field(None, gt=0)
    """Tokens of prompt and answer together; null takes what both the engines serve and one bin of
    training holds."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Longest time one call may take, waiting for an engine included."""
    session_cache_mib: int = Field(512, gt=0)
    """Memory for the token ids of recent executions; older ones are read again from the store."""
    dialects: list[str] = Field(["anthropic", "chat", "responses"], min_length=1)
    """HTTP dialects that are served; your own is the `module:Class` of a proxy.Dialect."""
    tool_call_format: str = "auto"
    """How the model writes tool calls: hermes, qwen3_coder, none, your own `module:function`, or
    auto, which reads it off the chat template."""
    chat_template_kwargs: dict[str, bool | str] = Field(default_factory=dict)
    """Extra variables of the chat template (for example enable_thinking: false)."""
    unproven_template: bool = False
    """Serve a chat template that failed the proof of incremental rendering; prompts may then differ
    from its own."""
    harness_profile: str = "generic"
    """Rules that tell the role of a call: claude_code, codex, mini_swe_agent, your own
    `module:function`, or generic, which also knows the headers of the others."""


class RouterConfig(Section):
    """How calls reach engines and survive their loss."""

    max_attempts: int = Field(20, gt=0)
    """Engine failures one call may outlive; planned moves are not counted."""
    backoff_s: float = Field(0.2, ge=0)
    """Pause after a failure before the next try; grows to 2 s."""
    drain_grace_s: float = Field(2.0, gt=0)
    """How long a cancelled call may take to hand over its last tokens before its connection is
    closed."""
    connect_timeout_s: float = Field(5.0, gt=0)
    stall_timeout_s: float = Field(600.0, gt=0)
    """Silence of an engine after which it counts as dead for that call."""


class EvaluatorConfig(Section):
    """How the work left in the workspace is scored."""

    timeout_s: float = Field(120.0, gt=0)
    retries: int = Field(2, ge=0)
    """Evaluator failures that are tried again before the execution is excluded from training."""


class HarnessConfig(Section):
    """How a harness program is run."""

    tasks: InputPath | None = None
    """Directory of tasks, one sub-directory with a task.yaml each; those below examples/ are found
    from any directory."""
    kind: str = "command"
    """How a harness runs: command, or your own `module:function`, an async function that is given a
    harness.HarnessRequest."""
    command: str | None = None
    """Harness command of tasks that name none; {prompt}, {prompt_file}, {workspace}, {task},
    {model}, {base_url} are filled in word by word (no shell); other braces stay as they are, and
    {{prompt}} is a literal {prompt}."""
    workspaces: UserPath | None = None
    """Where workspaces are made; null takes a folder beside the store."""
    keep_workspaces: bool = False
    timeout_s: float = Field(3600.0, gt=0)
    """Wall time of one harness; when it passes, what is in the workspace is scored."""
    overall_timeout_s: float = Field(14_400.0, gt=0)
    """Wall time of an execution with its evaluation and retries; when it passes, the execution is
    dropped."""
    cpu_s: int | None = Field(None, gt=0)
    """CPU seconds of each process; null sets no limit."""
    memory_mib: int | None = Field(None, gt=0)
    """Resident memory of the whole process group; the group is killed above it."""
    max_file_mib: int = Field(1024, gt=0)
    """Largest file a harness may write."""
    max_output_kib: int = Field(1024, gt=0)
    """Output kept of each stream; the rest is read and thrown away."""
    container_prefix: list[str] = Field(default_factory=list)
    """Words put before the command, for example a container runtime with its options; the same
    placeholders are filled in."""
    pass_environment: list[str] = Field(default_factory=lambda: ["PATH", "LANG", "LC_ALL", "TZ"])
    """Variables copied from the control plane; everything else is withheld."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables set in addition."""
    max_concurrent: int | None = Field(None, gt=0)
    """Harnesses running at the same time, where the control plane's host cannot run as many as the
    cells hold (scheduler.cell_capacity * cluster.num_cells); null sets no limit of its own."""


class ProcessorConfig(Section):
    """How executions become bounded training data."""

    max_trajectories: int = Field(5, gt=0)
    """J_max: branches chosen from one execution (the paper's default)."""
    role_priority: tuple[CallRole, ...] = ("main", "main_summary", "sub_agent", "sub_agent_summary")
    """Classes in the order they are drawn from; roles not listed never train."""
    advantage: str = "mean_std"
    """mean_std divides by the group's standard deviation (GRPO); mean only centres (Dr. GRPO); your own:
    `module:function`, called with (rewards, this section)."""
    min_spread: float = Field(1e-6, gt=0)
    """mean_std and mean give zeros to groups whose rewards spread less than this."""
    train_truncated: bool = True
    """Whether tokens of a call cut by its token limit are trained."""
    seed: int = 0


class RolloutConfig(Section):
    """Everything between a harness and the tokens that training receives."""

    sampling: SamplingConfig = SamplingConfig()
    proxy: ProxyConfig = ProxyConfig()
    router: RouterConfig = RouterConfig()
    harness: HarnessConfig = HarnessConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    processor: ProcessorConfig = ProcessorConfig()
