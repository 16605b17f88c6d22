"""Which adapter overrides which class of transformers.

Names only: transformers is not imported here; whoever has a model of it has imported it.
"""

from __future__ import annotations

from turnout.models import mamba
from turnout.models.patch import Adapter

_MODELS = "transformers.models"

# Module, mixer, and the names of their RMS norms.
_KINDS = {
    "mamba": (mamba.SelectiveMixer, "Mamba", "MambaMixer", "MambaRMSNorm"),
    "falcon_mamba": (mamba.SelectiveMixer, "FalconMamba", "FalconMambaMixer", "FalconMambaRMSNorm"),
    "jamba": (mamba.SelectiveMixer, "Jamba", "JambaMambaMixer", "JambaRMSNorm"),
    "mamba2": (mamba.Mixer, "Mamba2", "Mamba2Mixer", "Mamba2RMSNorm"),
    "bamba": (mamba.Mixer, "Bamba", "BambaMixer", "BambaRMSNorm"),
    "falcon_h1": (mamba.Mixer, "FalconH1", "FalconH1Mixer", "FalconH1RMSNorm"),
    "zamba2": (mamba.Mixer, "Zamba2", "Zamba2MambaMixer", "Zamba2RMSNorm"),
}

ADAPTERS: dict[str, type[Adapter]] = {}
MODELS: set[str] = set()
for _module, (_mixer, _model, _mixer_name, _norm_name) in _KINDS.items():
    _where = f"{_MODELS}.{_module}.modeling_{_module}"
    ADAPTERS |= {f"{_where}.{_mixer_name}": _mixer, f"{_where}.{_norm_name}": mamba.RMSNorm}
    MODELS |= {f"{_where}.{_model}Model", f"{_where}.{_model}ForCausalLM"}
