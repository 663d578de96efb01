# SPDX-License-Identifier: Apache-2.0
"""accelerate on models that train: losses and gradients next to PEFT's own and to float64."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import mortar
from mortar.compat import _peft_training
from mortar.compat.peft import accelerate, restore
from peft_models import ADAPTERS, adapted, gpt2, llama, tokens

ACTIVE = list(ADAPTERS)


def trainable(model, active):
    """In training mode with these adapters active, whose parameters require gradients."""
    model.base_model.set_adapter(active)
    return model.train()


def train_step(model, ids, **options):
    """Logits, and the gradients of all parameters that require one."""
    model.zero_grad()
    torch.manual_seed(3)
    logits = model(input_ids=ids, **options).logits
    logits.float().square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


def compare(model, ids, factor=4.0, **options):
    """Mortar's step is no less exact than PEFT's, up to `factor` roundings of luck."""
    peft = train_step(model, ids, **options)
    exact = train_step(copy.deepcopy(model).double(), ids, **options)
    accelerate(model)
    got = train_step(model, ids, **options)
    restore(model)
    assert got[0].dtype == peft[0].dtype
    assert got[1].keys() == peft[1].keys()
    assert got[1]
    for g, p, e in [(got[0], peft[0], exact[0]),
                    *((got[1][n], peft[1][n], exact[1][n]) for n in got[1])]:  # fmt: skip
        assert g.dtype == p.dtype
        size = e.abs().max() + 1e-30
        slack = 8 * torch.finfo(g.dtype).eps
        mine, theirs = ((t.double() - e).abs().max() / size for t in (g, p))
        assert mine <= factor * theirs + slack


@pytest.mark.parametrize("name", ACTIVE)
def test_every_adapter_trains_as_in_peft(device, name):
    """rsLoRA, rank and alpha patterns, ranks that are no multiples of 8."""
    compare(trainable(adapted(llama(device=device)), name), tokens(3, 9, device))


@pytest.mark.parametrize("active", [["small", "odd"], ["partial", "pattern"], ACTIVE])
def test_active_adapters_are_summed(device, active):
    compare(trainable(adapted(llama(device=device)), active), tokens(2, 7, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half_adapters", [True, False])
def test_half_models(device, dtype, half_adapters):
    model = adapted(llama(dtype, device))
    if half_adapters:
        model = model.to(dtype)
    compare(trainable(model, "small"), tokens(2, 7, device))
    compare(trainable(model, ["small", "odd"]), tokens(2, 7, device))


def test_several_float32_adapters_are_rounded_once(device):
    """Onto a bfloat16 base, as PEFT sums them: two roundings would miss a fifth of the values."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(32, 512, device=device, dtype=torch.bfloat16))
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.base_model.set_adapter(["one", "two"])
    accelerate(model.train())
    layer, x = model.base_model.model[0], torch.randn(64, 32, device=device).bfloat16()
    want = layer.base_layer(x).double()
    for name in ("one", "two"):
        a, b = (kind[name].weight.double() for kind in (layer.lora_A, layer.lora_B))
        want += layer.scaling[name] * (x.double() @ a.T) @ b.T
    assert (layer(x) == want.bfloat16()).double().mean() > 0.99


def test_adapters_of_different_dtypes(device):
    model = adapted(llama(torch.bfloat16, device))
    for name, parameter in model.named_parameters():
        if ".small." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # served by PEFT, trained by Mortar
        compare(trainable(model, ["small", "odd"]), tokens(2, 7, device))


def test_conv1d(device):
    settings = {"one": {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}}
    compare(trainable(adapted(gpt2(device), settings), "one"), tokens(2, 7, device))


def counted(monkeypatch):
    """The options of every layer's call, whichever of the two it was."""
    calls = []
    for owner, name in ((mortar.lora, "linear"), (_peft_training, "adapted_linear")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, original=original, **o: calls.append(o) or original(*a, **o)
        )
    return calls


def test_dropout_is_fused_and_drawn_from_torch(device, monkeypatch):
    model = trainable(adapted(llama(device=device), lora_dropout=0.3), "small")
    calls, ids = counted(monkeypatch), tokens(2, 9, device)
    accelerate(model)
    first = train_step(model, ids)
    assert len(calls) == 14
    assert {call["dropout"] for call in calls} == {0.3}
    again = train_step(model, ids)  # the same seed
    assert torch.equal(first[0], again[0])
    torch.manual_seed(4)
    assert not torch.equal(model(input_ids=ids).logits, first[0])
    eval_logits = model.eval()(input_ids=ids).logits
    restore(model)
    torch.testing.assert_close(eval_logits, model(input_ids=ids).logits)


def test_mean_over_masks_is_that_of_peft(device):
    """The gradient of B is linear in the masks: over many it tends to that without dropout."""
    base = nn.Sequential(nn.Linear(16, 12)).to(device)
    config = mortar_config(r=4, lora_dropout=0.5, target_modules=["0"])
    model = peft_model(base, config).train()
    x = torch.randn(8, 16, device=device)
    accelerate(model)

    def gradient():
        model.zero_grad()
        model(x).sum().backward()
        return model.base_model.model[0].lora_B["default"].weight.grad.clone()

    mean = sum(gradient() for _ in range(400)) / 400
    model.eval()
    want = gradient()
    assert (mean - want).abs().max() < 0.25 * want.abs().max()


def mortar_config(**options):
    from peft import LoraConfig

    return LoraConfig(**{"init_lora_weights": False, **options})


def peft_model(base, config):
    from peft import get_peft_model

    return get_peft_model(base, config)


def test_in_eval_mode_with_a_gradient(device, monkeypatch):
    calls = counted(monkeypatch)
    model = trainable(adapted(llama(device=device)), "small").eval()
    accelerate(model)
    _, found = train_step(model, tokens(2, 5, device))
    assert found
    assert len(calls) == 14
    with torch.no_grad():
        model(input_ids=tokens(2, 5, device))
    assert len(calls) == 14  # inference is PEFT's


CHANGES = {
    "switched": lambda m: m.base_model.set_adapter(["odd"]),
    "rescaled": lambda m: [
        layer.set_scale("small", 3.0) for layer in m.modules() if hasattr(layer, "set_scale")
    ],
    "added": lambda m: (
        m.add_adapter("new", mortar_config(r=3, target_modules=["q_proj", "lm_head"])),
        m.base_model.set_adapter(["small", "new"]),
    ),
    "deleted": lambda m: (m.base_model.set_adapter(["odd"]), m.delete_adapter("small")),
    "merged": lambda m: m.merge_adapter(["small"]),
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "replaced": lambda m: [
        setattr(p, "data", p.data * 2) for n, p in m.named_parameters() if ".small." in n
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_accelerated(device, change):
    torch.manual_seed(0)
    model = trainable(adapted(llama(device=device)), "small")
    plain = copy.deepcopy(model)
    ids = tokens(2, 7, device)
    accelerate(model)
    train_step(model, ids)
    for each in (model, plain):
        torch.manual_seed(1)
        CHANGES[change](each)
        each.train()
        for name, p in each.named_parameters():  # something to train, whatever happened
            if name.endswith("norm.weight"):
                p.requires_grad_()
    got, want = train_step(model, ids), train_step(plain, ids)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert got[1].keys() == want[1].keys()
    for name, g in got[1].items():
        torch.testing.assert_close(g, want[1][name], rtol=1e-3, atol=1e-4)


def test_layers_left_to_peft_train_through_it(device):
    settings = {"dora": {"r": 4, "target_modules": ["q_proj"], "use_dora": True}}
    model = trainable(adapted(llama(device=device), settings), "dora")
    model.add_adapter("plain", mortar_config(r=4, target_modules=["v_proj"]))
    model.base_model.set_adapter(["dora", "plain"])
    ids = tokens(2, 7, device)
    want = train_step(model, ids)
    with pytest.warns(UserWarning, match="layers left to PEFT: 2 x DoraLinearVariant") as caught:
        accelerate(model)
    assert len([w for w in caught if "left to PEFT" in str(w.message)]) == 1
    got = train_step(model, ids)
    assert got[1].keys() == want[1].keys()
    for name, g in got[1].items():
        torch.testing.assert_close(g, want[1][name], rtol=1e-3, atol=1e-5)


def test_hooks_on_an_adapter_are_respected(device):
    model = trainable(adapted(llama(device=device)), "small")
    seen = []
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["small"].register_forward_hook(lambda *a: seen.append(1))
    accelerate(model)
    with pytest.warns(UserWarning, match="hooks or another forward on the modules"):
        train_step(model, tokens(2, 5, device))
    assert seen == [1]


def test_state_and_parameters_are_those_of_peft(device, tmp_path):
    model = trainable(adapted(llama(device=device)), "small")
    before = {n: id(p) for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    accelerate(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    train_step(model, tokens(2, 5, device))
    optimizer.step()
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert (tmp_path / "small" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(device, use_reentrant, dropout):
    model = trainable(adapted(llama(device=device), lora_dropout=dropout), "small")
    accelerate(model)
    ids = tokens(2, 7, device)
    want = train_step(model, ids)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = train_step(model, ids)
    assert torch.equal(got[0], want[0])
    for name, g in got[1].items():
        assert torch.equal(g, want[1][name])


def test_autocast(device):
    model = trainable(adapted(llama(device=device)), "small")
    ids = tokens(2, 7, device)

    def run():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return train_step(model, ids)

    peft = run()
    accelerate(model)
    got = run()
    assert got[0].dtype == peft[0].dtype
    for name, g in got[1].items():
        assert g.dtype == torch.float32
        assert (g - peft[1][name]).norm() <= 0.1 * peft[1][name].norm()


# ---- several adapters in one batch ---------------------------------------------------------------

NAMES = ["odd", "__base__", "partial", "small", "odd", "pattern"]


def separate_steps(model, ids, names):
    """Gradients of one batch of its own for every adapter, of the same sum of losses."""
    found = {}
    for name in dict.fromkeys(names):
        rows = [i for i, n in enumerate(names) if n == name]
        model.zero_grad()
        if name == "__base__":
            continue
        model.base_model.set_adapter([name])
        model(input_ids=ids[rows]).logits.square().sum().backward()
        found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.base_model.set_adapter(ACTIVE)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mixed_gradients_equal_separate_steps(device, checkpointing):
    model = trainable(adapted(llama(device=device)), ACTIVE)
    ids = tokens(len(NAMES), 7, device)
    want = separate_steps(model, ids, NAMES)
    accelerate(model, train_mixed=True)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    model(input_ids=ids, adapter_names=NAMES).logits.square().sum().backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, g in got.items():
        torch.testing.assert_close(g, want[name], rtol=1e-3, atol=1e-3 * want[name].abs().max())


def test_mixed_training_of_different_dropouts_and_dtypes(device):
    settings = {n: {**s, "lora_dropout": p} for (n, s), p in
                zip(ADAPTERS.items(), (0.0, 0.5, 0.1, 0.9), strict=True)}  # fmt: skip
    model = trainable(adapted(llama(torch.bfloat16, device), settings), ACTIVE)
    for name, parameter in model.named_parameters():
        if ".odd." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate(model, train_mixed=True)
    ids = tokens(len(NAMES), 7, device)
    first = train_step(model, ids, adapter_names=NAMES)
    again = train_step(model, ids, adapter_names=NAMES)
    assert torch.equal(first[0], again[0])
    assert all(torch.isfinite(g).all() for g in first[1].values())
    assert {n.split(".")[-2] for n in first[1]} == set(ACTIVE)


def test_mixed_training_without_the_flag_raises_what_peft_raises(device):
    model = trainable(adapted(llama(device=device)), ACTIVE)
    ids = tokens(len(NAMES), 5, device)
    accelerate(model)
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when the model is in train"):
        model(input_ids=ids, adapter_names=NAMES)
    restore(model)
    accelerate(model, train_mixed=True)
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(input_ids=ids, adapter_names=["nobody"] * len(NAMES))
    with pytest.raises(ValueError, match="Length of `adapter_names`"):
        model(input_ids=ids, adapter_names=NAMES[1:])
    model.merge_adapter(["small"])
    with pytest.raises(ValueError, match="merged adapters"):
        model(input_ids=ids, adapter_names=NAMES)


def test_another_checkpoint_around_a_mixed_batch_is_noticed(device):
    model = trainable(adapted(llama(device=device)), ACTIVE)
    accelerate(model, train_mixed=True)
    block = model.base_model.model.model.layers[0]
    original = type(block).forward

    def forward(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            original, block, *args, use_reentrant=False, **kwargs
        )

    block.forward = forward
    logits = model(input_ids=tokens(len(NAMES), 5, device), adapter_names=NAMES).logits
    with pytest.raises(RuntimeError, match="gradient_checkpointing_enable"):
        logits.sum().backward()


def test_compiles_in_one_graph(device):
    config = mortar_config(r=4, target_modules=["0"])
    model = peft_model(nn.Sequential(nn.Linear(16, 12)).to(device), config).train()
    x = torch.randn(8, 16, device=device, requires_grad=True)
    accelerate(model)
    want = model(x)
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, x, dy), torch.autograd.grad(want, x, dy))
