"""`M2SScheduler`: the samplers of m2s under the contract of diffusers' discrete schedulers.

diffusers is optional, and this module is imported only by those who use it. A pipeline calls the network and asks the
scheduler for the next tokens:

    scheduler = M2SScheduler.of(head, sampler="psi")
    scheduler.set_timesteps(32)
    x = scheduler.sample_prior((4, 128), generator)
    for timestep in scheduler.timesteps:
        output = model(x, scheduler.network_time(timestep, len(x)))
        x = scheduler.step(output, timestep, x, generator=generator).prev_sample
"""

try:
    import diffusers.schedulers.scheduling_utils  # noqa: F401
except ImportError as error:
    raise ImportError(
        "M2SScheduler needs diffusers of version 0.42 or newer: pip install 'm2s-diffusion[diffusers]'"
    ) from error

from m2s.hub.diffusers.convert import from_diffusers
from m2s.hub.diffusers.output import M2SSchedulerOutput
from m2s.hub.diffusers.scheduler import M2SScheduler

__all__ = ["M2SScheduler", "M2SSchedulerOutput", "from_diffusers"]
