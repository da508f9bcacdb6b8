"""What training programs do over several dims at once."""

from __future__ import annotations

from hypercomm.training.gradients import clip_grad_norm_ as clip_grad_norm_
from hypercomm.training.gradients import grad_norm as grad_norm
