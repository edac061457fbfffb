"""Draw from a network for masks through LLaDA2Pipeline of diffusers, with a sampler of m2s as its scheduler.

    m2s train text8 --method mdlm --network.time no --out runs/text8
    python examples/diffusers_pipeline.py --checkpoint runs/text8 --prompt "the " --sampler remasking --steps 64

It needs `pip install transformers diffusers`. The pipeline gives the network no time, so it must be trained without one.
"""

import torch
import tyro
from diffusers import LLaDA2Pipeline

import m2s
from m2s.hub.auto_model import M2SModel
from m2s.hub.diffusers import M2SScheduler


def main(
    checkpoint: str, prompt: str = "", sampler: str = "ancestral", steps: int = 64, temperature: float = 1.0, seed: int = 0
) -> None:
    """Continue a prompt.

    Args:
        checkpoint: The folder of a text model for masks.
        prompt: The text that the sample begins with.
        sampler: A sampler of m2s.
        steps: Calls of the network.
        temperature: Of the predicted tokens; 0 takes the most likely one.
        seed: The seed of all randomness.
    """
    found = m2s.load(checkpoint)
    if found.tokenizer is None or found.length is None or found.head.process.mask is None:
        raise SystemExit(f"{checkpoint} is not a text model for masks: train one with --method mdlm")
    tokens = torch.as_tensor(found.tokenizer.encode(prompt), dtype=torch.long)
    # One block for the whole sequence: the network was not trained on blocks.
    scheduler = M2SScheduler.of(found.head, sampler=sampler, block_length=found.length)
    pipeline = LLaDA2Pipeline(model=M2SModel.of(found), scheduler=scheduler)
    drawn = pipeline(
        input_ids=tokens.unsqueeze(0),
        gen_length=found.length - len(tokens),
        num_inference_steps=steps,
        temperature=temperature,
        mask_token_id=found.head.process.mask,
        editing_threshold=None,
        output_type="seq",
        generator=torch.Generator().manual_seed(seed),
    )
    print(prompt + found.tokenizer.decode(drawn.sequences[0].tolist()))


if __name__ == "__main__":
    tyro.cli(main)
