"""How a cell trains: parallel layout, packing, objective, optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gyre_megatron.config.base import Section


class GspoConfig(Section):
    """GSPO adapted to executions with several trajectories."""

    eps_low: float = Field(3e-4, ge=0)
    """Clip below 1 - eps_low. The GSPO paper's value; sequence ratios stay close to 1 for long
    trajectories."""
    eps_high: float = Field(4e-4, ge=0)
    """Clip above 1 + eps_high. The GSPO paper's value; set it wide for short trajectories or no
    clipping."""
    ratio_level: Literal["trajectory", "execution", "token"] = "trajectory"
    """Tokens that share an importance ratio: a trajectory (GSPO), the whole execution, or each its
    own (GRPO)."""
    proximal: bool = False
    """Clip against the policy at the start of the step instead of the behaviour policy (decoupled
    objective)."""
    importance_cap: float = Field(2.0, gt=0)
    """Truncation of the behaviour correction under `proximal`; 2 bounds the variance and rarely
    binds."""
    importance_level: Literal["token", "trajectory"] = "token"
    """Whether the behaviour correction under `proximal` is per token or the trajectory's geometric
    mean."""
    max_log_ratio: float | None = Field(None, gt=0)
    """Trajectories whose mean log-ratio exceeds this (either sign) take no gradient; None keeps
    all."""
    max_staleness: int | None = Field(None, ge=0)
    """Tokens sampled more than this many weight versions ago take no gradient; None keeps all."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; 0 because GSPO trains without it."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy (the checkpoint training began from); 0 keeps no
    reference."""
    denominator: Literal["execution", "batch_tokens", "constant"] = "execution"
    """Loss denominator: mean per execution (the paper), mean over the tokens packed together (a
    group), or a constant length (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens to divide by under denominator `constant`."""


class OptimizerConfig(Section):
    """Adam with a warm-up and decay of the learning rate; lives on the core cell only."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 1e-6 is usual for RL of large models."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    decay_steps: int = Field(1, ge=1)
    """Steps after which `min_lr` is reached; unused by the constant style."""
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay; constant because RL runs are short and open-ended."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second-moment decay; shorter than 0.999 because batches are few and large."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator offset."""
    clip_grad: float = Field(1.0, ge=0)
    """Global gradient norm to clip to; 0 does not clip."""
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks (Megatron's DistributedOptimizer)."""


class TrainingConfig(Section):
    """Layout, packing and optimisation inside one cell."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks."""
    pp: int = Field(1, ge=1)
    """Pipeline stages."""
    vpp: int | None = Field(None, ge=2)
    """Model chunks per pipeline stage (interleaved schedule); None does not interleave."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks: they share the tokens of a bin."""
    ep: int = Field(1, ge=1)
    """Expert-parallel ranks."""
    etp: int | None = Field(None, ge=1)
    """Tensor-parallel ranks of the experts; None uses `tp`, as Megatron does."""
    sequence_parallel: bool | None = None
    """Shard activations of norms over tensor-parallel ranks; None turns it on when tp > 1."""
    token_budget: int | None = Field(None, ge=64)
    """Unique tokens in one bin: the size of a micro-step. The longest trajectory must fit, so calls
    are bounded by it; null takes what the longest call needs, and at least 16,384."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Parameter and activation type; gradients are always summed in fp32."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations recomputed in the backward pass: none, the attention core, or whole layers."""
    attention: str = "auto"
    """Tree attention core: `cpu` (the C++ kernel), `flex` (compiled FlexAttention, on GPUs), `auto`
    (by device), or your own as `module:function`."""
    transformer_engine: bool = False
    """Build layers from Transformer Engine modules (GPU) instead of Megatron's local ones."""
    head_chunk: int = Field(4096, ge=1)
    """Loss edges whose logits exist at one time; bounds the memory of the vocabulary projection."""
    moe_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Token dispatcher of MoE layers."""
    moe_aux_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss, counted on unique tokens; 0 because RL starts from a
    balanced model."""
    router_replay: bool = False
    """Route each token to the experts the rollout engine chose for it, where it returned them."""
    seed: int = 1
    """Seed of parameter initialisation where no checkpoint is given."""
    objective: str = "gspo"
    """What a step optimises: `gspo` with the options of `training.gspo`, or your own as
    `module:function`."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Given to an objective of your own as they are."""
    gspo: GspoConfig = GspoConfig()
    """Options of the objective; an objective of your own is given them too."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1; set training.pp or remove training.vpp")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel needs tp > 1; raise training.tp or remove "
                "training.sequence_parallel"
            )
        if self.gspo.denominator == "constant" and self.gspo.constant_length is None:
            raise ValueError(
                "training.gspo.denominator 'constant' needs training.gspo.constant_length"
            )
        return self

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations of norms are sharded over tensor-parallel ranks."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def min_ranks(self) -> int:
        """Ranks of one model replica; the cell size must be a multiple."""
        return self.pp * self.tp * self.cp
