"""`MaskAt`, for a mask anywhere in the vocabulary: bit for bit a network with a permuted vocabulary."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import m2s
from compiled import passes
from m2s.models import DiT, DiTConfig, MaskAt
from m2s.ops import use_backend

K, B, L, STATES = 11, 4, 9, 20
MASKS = [0, 4, K - 1, K, K + 1, STATES - 1]
EVERY = pytest.mark.parametrize("mask", MASKS)
HEADS = {
    "absorbing": m2s.Posterior(m2s.Absorbing(K, m2s.LogLinear())),
    "hybrid": m2s.Posterior(m2s.Hybrid(K, 0.2), "exact"),
    "score": m2s.LogScore(m2s.Absorbing(K, m2s.LogLinear()), "sigma"),
}


def order(mask: int) -> Tensor:
    """The network's id of each of our states, then the remaining ids."""
    clean = [i for i in range(64) if i != mask][:K]
    return torch.tensor([*clean, mask, *(i for i in range(64) if i not in (*clean, mask))])


def networks(mask: int, **options: object) -> tuple[DiT, MaskAt]:
    """A network with our ids, and an adapter of the same network with permuted ids."""
    config = {"width": 16, "depth": 1, "heads": 2, "condition_width": 8, **options}
    plain, other = (DiT(DiTConfig(STATES, **config)) for _ in range(2))
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    other.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for name in ("embedding.weight", "head.weight", "head.bias"):
            other.get_parameter(name)[order(mask)] = plain.get_parameter(name)
    return plain, MaskAt(other, mask=mask, vocab=K)


def loss(net: nn.Module, head: m2s.Head) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x_0 = torch.randint(K, (B, L), generator=generator)
    t = m2s.stratified_times(B, 0.05, 0.95, generator)
    return m2s.Objective(net, head, generator=generator)(x_0, t)


@EVERY
@pytest.mark.parametrize("unprojected", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradient_are_equal_bit_for_bit(mask: int, unprojected: bool, name: str) -> None:
    plain, adapted = networks(mask)
    plain.unprojected = adapted.unprojected = unprojected
    assert adapted.network.unprojected is unprojected
    one, other = (loss(net, HEADS[name]) for net in (plain, adapted))
    assert torch.equal(one, other) and one.sum() > 0
    one.sum().backward()
    other.sum().backward()
    for key, parameter in adapted.network.named_parameters():
        expected, found = plain.get_parameter(key).grad, parameter.grad
        in_our_ids = found[order(mask)] if key in ("embedding.weight", "head.weight", "head.bias") else found
        assert expected.any() and torch.equal(in_our_ids, expected), key


@EVERY
@pytest.mark.parametrize("unprojected", [False, True])
@pytest.mark.parametrize("sampler", ["bayes", "ancestral", "confidence"])
def test_samples_are_equal(mask: int, unprojected: bool, sampler: str) -> None:
    plain, adapted = (net.eval() for net in networks(mask))
    plain.unprojected = adapted.unprojected = unprojected
    start = torch.full((B, L), -1)
    start[:, 2] = 5
    drawn = [
        m2s.sample(net, HEADS["absorbing"], (B, L), steps=6, sampler=sampler, clamp=start, seed=0) for net in (plain, adapted)
    ]
    assert torch.equal(*drawn) and len(drawn[0].unique()) > 3 and (drawn[0][:, 2] == 5).all()
    theirs = adapted.to_network(drawn[1])
    assert not (theirs == mask).any() and torch.equal(adapted.from_network(theirs), drawn[1])


@EVERY
def test_nelbos_are_equal(mask: int) -> None:
    results = [
        m2s.elbo(net.eval(), HEADS["hybrid"], torch.arange(B * L).reshape(B, L) % K, generator=torch.Generator().manual_seed(0))
        for net in networks(mask)
    ]
    assert torch.equal(results[0].nats, results[1].nats)


def test_condition_is_passed_to_the_network() -> None:
    plain, adapted = (net.eval() for net in networks(4, classes=3))
    x_t, t, labels = torch.randint(K + 1, (B, L)), torch.rand(B), torch.tensor([0, 1, 2, 3])
    assert torch.equal(adapted(x_t, t, labels)[..., : K + 1], plain(x_t, t, labels)[..., : K + 1])
    assert not torch.equal(adapted(x_t, t, labels), adapted(x_t, t))


@EVERY
def test_ids_are_converted_both_ways(mask: int) -> None:
    adapted = MaskAt(nn.Identity(), mask=mask, vocab=K)
    ours = torch.arange(K + 1)
    theirs = adapted.to_network(ours)
    assert torch.equal(theirs, order(mask)[: K + 1]) and theirs[K] == mask
    assert torch.equal(adapted.from_network(theirs), ours)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        found = adapted.to_network(ours.to(dtype))
        assert torch.equal(found, theirs) and found.dtype == torch.long
        assert torch.equal(adapted.from_network(theirs.to(dtype)), ours)
    assert adapted.to_network(ours.reshape(3, 2, 2)).shape == (3, 2, 2)
    for wrong in (-1, K + 1):
        with pytest.raises(ValueError, match=rf"ids\[0\] is {wrong}, but tokens must lie in 0..{K}"):
            adapted.to_network(torch.tensor([wrong]))
    invalid = [i for i in range(-1, STATES + 2) if i not in theirs.tolist()]
    for wrong in invalid:
        with pytest.raises(ValueError, match=rf"ids\[0\] is {wrong}, but tokens must lie in"):
            adapted.from_network(torch.tensor([wrong]))


# --- the reordered last layer ----------------------------------------------------------------------------------------------


def call(adapted: MaskAt) -> m2s.Unprojected:
    """The output for a fixed input."""
    output = adapted(torch.zeros(1, 3, dtype=torch.long), torch.tensor([0.5]))
    assert isinstance(output, m2s.Unprojected)
    return output


def test_reordered_last_layer_is_cached_until_it_changes() -> None:
    _, adapted = networks(4)
    adapted.unprojected = True
    head = adapted.network.head
    with torch.no_grad():
        assert call(adapted).weight is not call(adapted).weight  # no cache in training mode
        adapted.eval()
        first = call(adapted)
        assert call(adapted).weight is first.weight and call(adapted).bias is first.bias
        changes = {
            "in place": lambda: head.weight.mul_(2),
            "the bias": lambda: head.bias.add_(1),
            "loaded": lambda: adapted.load_state_dict({k: v * 3 for k, v in adapted.state_dict().items()}),
            "another tensor": lambda: setattr(head.weight, "data", head.weight.data * 5),
            "another tensor, maybe at a freed address": lambda: [
                setattr(head.weight, "data", head.weight.data * i) for i in (2, 3, 5)
            ],
            "another parameter": lambda: setattr(head, "weight", nn.Parameter(head.weight * 7)),
            "dtype": lambda: adapted.double().float(),
            "through .data, then eval()": lambda: (head.weight.data.mul_(2), adapted.eval()),
        }
        for name, change in changes.items():
            before = call(adapted)
            change()
            after = call(adapted)
            assert after.weight is not before.weight, name
            assert torch.equal(after.weight, head.weight[order(4)]) and torch.equal(after.bias, head.bias[order(4)]), name
            assert call(adapted).weight is after.weight, name
    learning = call(adapted)
    assert learning.weight is not after.weight and learning.weight.requires_grad  # gradients need a new tensor
    head.requires_grad_(False)
    assert call(adapted).weight is call(adapted).weight
    adapted.eval()
    with torch.inference_mode():
        cached = call(adapted).weight
        assert call(adapted).weight is cached
    output = call(adapted)  # a tensor cached in inference mode also works with gradients of other layers
    assert output.weight is cached
    output.project().sum().backward()
    assert adapted.network.embedding.weight.grad.any()


def test_training_in_eval_mode_uses_the_current_weights() -> None:
    """Every optimizer step invalidates the cached layer."""
    plain, adapted = (net.eval() for net in networks(4))
    plain.unprojected = adapted.unprojected = True
    for net in (plain, adapted):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            with torch.no_grad():
                net(torch.zeros(1, 3, dtype=torch.long), torch.tensor([0.5]))  # this caches the layer
            optimizer.zero_grad()
            loss(net, HEADS["absorbing"]).sum().backward()
            optimizer.step()
    assert torch.equal(loss(plain, HEADS["absorbing"]), loss(adapted, HEADS["absorbing"]))


def test_adapter_can_be_copied_pickled_and_converted() -> None:
    _, adapted = networks(4)
    adapted.unprojected = True
    with torch.no_grad():
        call(adapted.eval())
    for other in (copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
        assert other._kept is None and not other.training
        with torch.no_grad():
            assert torch.equal(call(other).project(), call(adapted).project())
    assert {name.removeprefix("network.") for name in adapted.state_dict()} == set(adapted.network.state_dict())
    assert not hasattr(MaskAt(nn.Embedding(STATES, STATES), 4, K), "unprojected")
    assert "mask=4, vocab=11" in repr(adapted) and adapted.double().network.head.weight.dtype == torch.float64


def test_fused_loss_uses_the_reordered_weights() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, adapted = (net.to(device) for net in networks(4))
    plain.unprojected = adapted.unprojected = True
    x_0 = torch.randint(K, (B, L), device=device)
    x_t, t = torch.where(torch.rand(B, L, device=device) < 0.5, K, x_0), torch.rand(B, device=device)
    with use_backend("fused"):
        one, other = (m2s.score_entropy(HEADS["absorbing"], net(x_t, t), x_0, x_t, t) for net in (plain, adapted))
        one.sum().backward()
        other.sum().backward()
    assert torch.equal(one, other) and torch.equal(adapted.network.head.weight.grad[order(4)], plain.head.weight.grad)


COMPILED = """
import m2s
from m2s.models import DiT, DiTConfig, MaskAt

adapted = MaskAt(DiT(DiTConfig(12, width=16, depth=1, heads=2)), mask=4, vocab=11).to(device).eval()
for parameter in adapted.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
x_t, t = torch.randint(12, (2, 5), device=device), torch.rand(2, device=device)
compiled = torch.compile(adapted, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(x_t, t), adapted(x_t, t))
logits = adapted(x_t, t).detach()
adapted.unprojected = True
parts = torch.compile(adapted.forward, backend="eager", fullgraph=True)  # as m2s sample compiles it
with torch.no_grad():
    one = parts(x_t, t)
assert isinstance(one, m2s.Unprojected)
torch.testing.assert_close(one.project(), logits)
with torch.no_grad():
    adapted.network.head.weight.zero_()
    assert not parts(x_t, t).weight.any()
"""


def test_adapter_compiles() -> None:
    passes(COMPILED)


def test_second_derivatives() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    adapted = MaskAt(lambda x_t, t: x, mask=2, vocab=5)
    assert torch.autograd.gradgradcheck(lambda x: adapted._moved(x, 1).pow(3), (x,))


@pytest.mark.usefixtures("without_shape_hook")
def test_invalid_outputs_masks_and_tokens_raise() -> None:
    x_t, t = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.5])
    for mask, needed in ((4, K + 1), (K + 3, K + 4)):
        adapted = MaskAt(lambda x_t, t, n=needed: torch.zeros(*x_t.shape, n - 1), mask, K)
        with pytest.raises(
            ValueError, match=rf"output has {needed - 1} columns, but it needs {needed} of them for {K} .* mask at {mask}$"
        ):
            adapted(x_t, t)
    with pytest.raises(ValueError, match="output has 5 columns"):
        MaskAt(lambda x_t, t: m2s.Unprojected(torch.zeros(1, 2, 3), torch.zeros(5, 3)), 4, K)(x_t, t)
    with pytest.raises(TypeError, match=r"the network's output must be a torch\.Tensor, not tuple"):
        MaskAt(lambda x_t, t: (torch.zeros(1, 2, 12),), 4, K)(x_t, t)
    with pytest.raises(ValueError, match="mask is -1"):
        MaskAt(nn.Identity(), -1, K)
    with pytest.raises(ValueError, match=r"ids\[0, 0\] is 12, but tokens must lie in 0..11"):
        MaskAt(nn.Identity(), 4, K)(torch.tensor([[K + 1]]), t)
