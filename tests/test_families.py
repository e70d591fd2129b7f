"""hybrid.py over the model families of transformers: its own plans, and all configs that declare one without experts' styles.

Compared: a tiny instance of each config class (2 blocks, 4 heads), on one process, with its matrices divided between two ranks
(tp=2), with its tokens, too (split_gather), with its tokens alone (all_to_all, ring), and with its blocks (pp=2), in float64, also
where transformers' forward goes through fp32: loss and every gradient at 1e-9, for only the order of summation differs. What
hybrid.py refuses by name (REFUSED) is right, too; wrong numbers are not. Two CPU ranks; by default three families, under 10 s; the
sweep (`-m sweep`) has all, prints what became of each, and takes some 8 min.
"""
import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import random
from torch import nn
from torch.overrides import TorchFunctionMode

from hybrid import STYLES, Hybrid

VOCAB, ROWS, LENGTH = 53, 2, 7
SIZES = dict(  # by name of a config's field; those that a config lacks are left out
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, n_ctx=64, max_position_embeddings=64, depth=2,
    num_heads=4,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, eod_token_id=2, sep_token_id=2, mask_token_id=3, sliding_window=8,
    max_window_layers=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, moe_hidden_size=32,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64, mamba_chunk_size=4, mamba_n_groups=1,
    linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, embedding_dim=16, embedding_rank=8, laurel_rank=4,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_codebooks=2, codebook_size=20,
    vision_vocab_size=VOCAB, prediction_head_size=32, query_pre_attn_scalar=8, patch_size=4, image_size=16, vision_output_dim=32,
    projector_input_dim=32, projector_output_dim=32, pos_emb_height=4, pos_emb_width=4, position_embedding_size=16,
    out_hidden_size=32, projector_hidden_size=32, n_input_layers=1, n_output_layers=1, n_recurrent_layers=1, H_cycles=1, L_cycles=1,
    image_token_id=50, video_token_id=51, audio_token_id=52, num_code_groups=2, block_multiple_of=8,
    type_vocab_size=2, ffn_dim=48, word_embed_proj_dim=16, dim=32, hidden_dim=48, n_layers=2, n_heads=4, embedding_size=16,
    num_labels=3)
MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
EACH_ONCE = ["sliding_attention", "full_attention"]
TEXT = {k: v for k, v in SIZES.items() if k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                                                "num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
             moe_hidden_size=32, experts_implementation="eager")
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4, image_size=16,
              vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, pos_emb_height=4, pos_emb_width=4,
              experts_implementation="eager")
SPECIAL = {  # config class -> other fields
    "BambaConfig": dict(attn_layer_indices=[1]),
    "CohereCompassTextConfig": dict(layer_types=EACH_ONCE, rope_parameters={
        kind: dict(rope_type="default", rope_theta=1e4) for kind in EACH_ONCE}),
    "Cosmos3EdgeTextConfig": MROPE,
    "DoryConfig": dict(num_hidden_layers=3),
    "EsmcConfig": dict(num_key_value_heads=4),
    "Gemma3nTextConfig": dict(num_kv_shared_layers=0, layer_types=EACH_ONCE),
    "Glm4vTextConfig": MROPE,
    "GlmImageTextConfig": MROPE,
    "GlmOcrTextConfig": MROPE,
    "EmbeddingGemma2TextConfig": dict(layer_types=EACH_ONCE, global_head_dim=16, num_global_key_value_heads=1),
    "Gemma4UnifiedTextConfig": dict(layer_types=EACH_ONCE, attention_k_eq_v=True, global_head_dim=16, num_global_key_value_heads=1),
    "GptOssConfig": dict(experts_implementation="eager"),
    "HunYuanVLTextConfig": MROPE,
    "Lfm3Config": dict(layer_types=["conv", "full_attention"]),
    "Llama4Config": dict(pad_token_id=0, vocab_size=VOCAB, text_config=TEXT | dict(intermediate_size_mlp=48), vision_config=VISION),
    "Llama4VisionConfig": dict(intermediate_size=128),
    "MuseGlimmerConfig": dict(text_config=TEXT, vision_config=VISION),
    "MuseSparkConfig": dict(experts_implementation="eager", text_config=TEXT, vision_config=VISION, audio_config=dict(
        out_hidden_size=32, hidden_sizes=[32] * 4, depths=[1] * 4)),
    "MuseSparkTextConfig": dict(experts_implementation="eager"),
    "NeoMMEConfig": dict(head_dim=16),
    "PaddleOCRTextConfig": MROPE,
    "Qwen2VLTextConfig": MROPE,
    "Qwen2_5_VLTextConfig": MROPE,
    "Qwen2_5OmniTextConfig": MROPE,
    "Qwen3_5TextConfig": dict(layer_types=["linear_attention", "full_attention"], rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], partial_rotary_factor=1.0)),
    "Qwen3VLTextConfig": MROPE,
    "Phi4MultimodalConfig": dict(vision_config=VISION | dict(crop_size=16), audio_config=dict(
        hidden_size=32, intermediate_size=48, num_blocks=1, num_attention_heads=4, ext_pw_out_channel=32, nemo_conv_channels=32)),
    "T5Gemma2DecoderConfig": dict(dropout_rate=0.0),
    "T5Gemma2TextConfig": dict(dropout_rate=0.0),
    "T5GemmaModuleConfig": dict(dropout_rate=0.0),
    "YoutuConfig": dict(num_key_value_heads=4),
}
MODELS = {  # where a config class does not lead to its model
    "Ernie4_5_VL_MoeVisionConfig": "Ernie4_5_VLMoeVisionTransformerPretrainedModel", "T5GemmaModuleConfig": "T5GemmaEncoder",
    "Llama4Config": "Llama4ForConditionalGeneration", "T5Gemma2DecoderConfig": "T5Gemma2Decoder",
}

PARTS = 6  # of the sweep
UNNAMED, VOCABULARY = "has weights that the plan does not name", "divides no linear but the head"
AGAIN, LISTS = "more than once", "pipelines and divided tokens need one list of blocks"
OTHER_STAGE, BESIDE = "but forward reads it on stage", "beside hidden states that depend on weights"
REFUSED = {  # axis -> config class -> words of the reason; all others are right
    "tp": {
        "BambaConfig": VOCABULARY, "DiffLlamaConfig": VOCABULARY, "DogeConfig": "has weights of its own", "EsmcConfig": UNNAMED,
        "DoryConfig": "a forward of its own", "Emu3TextConfig": VOCABULARY, "FalconH1Config": VOCABULARY,
        "GptOssConfig": VOCABULARY,
        "HunYuanDenseV1Config": VOCABULARY, "HunYuanVLTextConfig": VOCABULARY, "Lfm2Config": VOCABULARY,
        "Lfm3Config": VOCABULARY, "NeoMMEConfig": UNNAMED, "Qwen3VLTextConfig": VOCABULARY,
    },
    "pp": {
        "DoryConfig": AGAIN, "EmbeddingGemma2TextConfig": OTHER_STAGE, "Gemma3nTextConfig": OTHER_STAGE,
        "Gemma4UnifiedTextConfig": BESIDE, "HrmTextConfig": LISTS, "MuseGlimmerAssistantConfig": OTHER_STAGE,
        "MuseGlimmerConfig": LISTS, "MuseSparkConfig": LISTS, "NeoMMEConfig": OTHER_STAGE,
    },
}
REFUSED["tokens"] = {
    **REFUSED["tp"], **dict.fromkeys(("HrmTextConfig", "MuseGlimmerConfig", "MuseSparkConfig"), LISTS), **dict.fromkeys((
    "Ernie4_5_VL_MoeVisionConfig", "Ernie4_5_VLMoeVisionConfig", "MuseGlimmerVisionConfig",  # hidden states without a dim of rows
    "Gemma4VisionConfig", "HiggsAudioV2Config", "NeoMMEConfig", "EmbeddingGemma2TextConfig", "YoutuConfig", "MuseSparkTextConfig",
    "Gemma3nTextConfig", "OlmoHybridConfig", "Qwen3_5TextConfig", "MuseGlimmerAssistantConfig", "Gemma4UnifiedTextConfig",
    "Llama4VisionConfig", "VoxtralRealtimeTextConfig"), "sp_mode=None"),  # the last one has a linear in its norms
}
NO_INTERFACE, OPTIONS, UNKNOWN = "transformers' attention interface", "is not supported by", "not known how its tokens"
REFUSED["ring"] = REFUSED["all_to_all"] = {
    **dict.fromkeys(("BambaConfig", "BloomConfig", "FalconH1Config", "OlmoHybridConfig", "Qwen3_5TextConfig"), NO_INTERFACE),
    **dict.fromkeys(("Gemma2Config", "T5GemmaModuleConfig", "VaultGemmaConfig"), OPTIONS),  # softcap
    **dict.fromkeys(("EmbeddingGemma2TextConfig", "Gemma4VisionConfig", "Llama4VisionConfig", "NeoMMEConfig",
                     "T5Gemma2DecoderConfig"), UNKNOWN),
    **dict.fromkeys(("GptOssConfig", "Lfm3Config", "MuseSparkTextConfig"), "is no linear's"),
    **dict.fromkeys(("HrmTextConfig", "MuseGlimmerConfig", "MuseSparkConfig"), LISTS),
    **dict.fromkeys(("DogeConfig", "Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VL_MoeVisionConfig", "Gemma3nTextConfig",
                     "Gemma4UnifiedTextConfig", "HiggsAudioV2Config", "MuseGlimmerAssistantConfig", "MuseGlimmerVisionConfig",
                     "DoryConfig"), "sp_mode=None"),
}
BROKEN = {"Llama4Config": "image_outputs"}  # config class -> words of the error that the model's own forward ends with


@functools.cache
def dense_configs() -> dict:
    """Name -> config class, where the declared plan has only styles of dense models."""
    import transformers
    found = {}
    for module in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        with contextlib.suppress(ModuleNotFoundError):
            for key, value in vars(importlib.import_module(name)).items():
                if inspect.isclass(value) and value.__module__ == name and issubclass(value, transformers.PreTrainedConfig):
                    plan = getattr(value, "base_model_tp_plan", None)
                    if plan and set(plan.values()) <= STYLES:
                        found[key] = value
    return found


def tiny(config_class):
    known = set(config_class.__dataclass_fields__) | set(getattr(config_class, "attribute_map", {}))
    fields = {k: v for k, v in SIZES.items() if k in known}
    fields |= {k: 0.0 for k in known if re.search(r"(pdrop|dropout(_prob|_rate)?)$", k)}
    fields |= {"use_cache": False} if "use_cache" in known else {}
    config = config_class(**fields | SPECIAL.get(config_class.__name__, {}))
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *[r for r in rope.values() if isinstance(r, dict)]):
        if "mrope_section" in each:
            half = int((getattr(config, "head_dim", None) or 8) * each.get("partial_rotary_factor", 1.0)) // 2
            each["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    return config


def model_class(config_class):
    from transformers.models.auto import modeling_auto
    modeling = config_class.__module__.replace(".configuration_", ".modeling_")
    if config_class.__name__ in MODELS:
        return getattr(importlib.import_module(modeling), MODELS[config_class.__name__])
    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING"):
        with contextlib.suppress(KeyError, ValueError):
            found = getattr(modeling_auto, mapping)[config_class]
            return found if inspect.isclass(found) else found[0]
    module = importlib.import_module(modeling)
    own = [c for c in vars(module).values() if inspect.isclass(c) and getattr(c, "config_class", None) is config_class
           and "PreTrainedModel" not in c.__name__ and c.__module__ == module.__name__]
    return min(own, key=lambda c: (not c.__name__.endswith("ForCausalLM"), not c.__name__.endswith("Model"), len(c.__name__)))


def build(name, head):
    """The model `head`, or the one that goes with the config class `name`."""
    import transformers
    config_class = getattr(transformers, name, None) or dense_configs()[name]
    config = tiny(config_class)
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = (getattr(transformers, head) if head else model_class(config_class))._from_config(config)
        for p in model.parameters():
            p.data = p.data.nan_to_num(0.0) + (0.1 if p.ndim == 1 else 0.2) * torch.randn(p.shape)  # biases are nothing special
    if (numel := sum(p.numel() for p in model.parameters())) > 3e6:
        raise ValueError(f"not tiny: {numel:,} parameters")
    if "grid_thw" in inspect.signature(model.forward).parameters:  # one image, which batches do not cut
        model.forward = functools.partial(model.forward, grid_thw=torch.tensor([[1, 4, 4]]))
    return model.double()


class InDouble(TorchFunctionMode):
    """Forward goes through fp32 nowhere: norms, softmax and rotary tables are float64, too."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        double = lambda x: torch.float64 if x is torch.float32 else x
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(double, args), **{k: double(v) for k, v in (kwargs or {}).items()})


def batch_of(name, model):
    """Words, or what an encoder of images reads."""
    pixels = lambda *shape: random(*shape, seed=2).double()
    words = dict(input_ids=3 + random(ROWS, LENGTH, high=VOCAB - 6, seed=1))
    others = {
        "DeepseekOcr2VisionEncoderConfig": lambda: dict(inputs_embeds=pixels(ROWS, 2 * LENGTH, 32), num_patches=LENGTH),
        "Ernie4_5_VLMoeVisionConfig": lambda: dict(hidden_states=pixels(16, 3 * 4 * 4)),
        "Ernie4_5_VL_MoeVisionConfig": lambda: dict(hidden_states=pixels(16, 3 * 4 * 4)),
        "Qwen3OmniMoeTalkerCodePredictorConfig": lambda: dict(inputs_embeds=pixels(ROWS, 2, 32)),
        "T5Gemma2DecoderConfig": lambda: dict(words, encoder_hidden_states=pixels(ROWS, 5, 32)),
        "VoxtralRealtimeTextConfig": lambda: dict(words, t_cond=pixels(ROWS, 1, 32)),
        "Gemma4VisionConfig": lambda: dict(pixel_values=pixels(ROWS, 9, 3 * 4 * 4), pixel_position_ids=torch.cartesian_prod(
            torch.arange(3), torch.arange(3)).expand(ROWS, 9, 2)),
        "Llama4VisionConfig": lambda: dict(pixel_values=pixels(ROWS, 3, 16, 16)),
        "MuseGlimmerVisionConfig": lambda: dict(pixel_values=pixels(16, 2 * 3 * 4 * 4)),
        "MuseGlimmerAssistantConfig": lambda: dict(noise_embeds=pixels(ROWS, 4, 32), context_hidden_states=pixels(
            ROWS, 5, model.encoder.fc.in_features)),
        "ViTConfig": lambda: dict(pixel_values=pixels(ROWS, 3, 16, 16)),
    }
    return others.get(name, lambda: words)()


def loss_fn(output, batch):
    """Cross entropy where there are scores of words; else a mean over rows of what is weighted otherwise at each place."""
    x = output["logits"] if "logits" in output else output["last_hidden_state"]
    ids = batch.get("input_ids")
    if ids is not None and "logits" in output and x.ndim == 3 and x.shape[:2] == ids.shape:
        return nn.functional.cross_entropy(x.reshape(-1, x.shape[-1]), ids.reshape(-1))
    x = x if len(x) == ROWS or x.ndim == 3 else x[None]
    return (x * torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).view(x[0].shape)).sum() / len(x) / 10


def rows_of(batch):
    return len(next(iter(batch.values())))


MESHES = {"tp": dict(tp=2), "pp": dict(pp=2), "tokens": dict(tp=2, sp_mode="split_gather"),
          "all_to_all": dict(sp=2, sp_mode="all_to_all"), "ring": dict(sp=2, sp_mode="ring")}


def beside_one_process(name, head, axis):
    """"right", or what else and why: "wrong", "refused", "failed", "no reference"."""
    try:
        reference = build(name, head)
        batch = batch_of(name, reference)
        with InDouble():
            expected = loss_fn(reference.train()(**batch), batch)
            expected.backward()
        if not expected.isfinite():
            return "no reference: its loss is not finite"
    except Exception as error:
        return f"no reference: {type(error).__name__}: {error}"
    try:
        engine = Hybrid(build(name, head), precision="fp32", **MESHES[axis])
        with InDouble():
            loss = engine.train().forward_backward(batch, ROWS if axis == "pp" and rows_of(batch) == ROWS else 1, loss_fn)
    except Exception as error:
        own = isinstance(error, (ValueError, RuntimeError)) and any(words in f"{error}" for words in REASONS)
        return f"{'refused' if own else 'failed'}: {type(error).__name__}: {error}"
    gaps = {"loss": abs(loss.item() - expected.item()) / max(abs(expected.item()), 1e-3)}
    for key, p in reference.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            gaps[key] = ((engine.full_grad(key) - grad).abs().max() / grad.abs().max().clamp(min=1e-3)).item()
    wrong = [f"{key} {gap:.0e}" for key, gap in gaps.items() if not gap < 1e-9]
    return f"wrong: {len(wrong)} of {len(gaps)}: {', '.join(wrong[:6])}" if wrong else "right"


REASONS = {words for of_axis in REFUSED.values() for words in of_axis.values()}


def in_turn(jobs):
    """What becomes of each job. Where the ranks do not agree, the others wait for ever: RuntimeError ends this run."""
    import transformers
    from torch.distributed.distributed_c10d import _get_default_store
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    store, rank, ranks, outcomes = _get_default_store(), dist.get_rank(), dist.get_world_size(), {}
    for job in jobs:
        mine = beside_one_process(*job)
        store.set(f"{job} {rank}", mine)
        deadline = time.monotonic() + (20.0 if mine == "right" else 4.0)
        while not store.check([f"{job} {other}" for other in range(ranks)]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"outcome: {mine} :on one rank, where another goes on")
            time.sleep(0.005)
        theirs = [store.get(f"{job} {other}").decode() for other in range(ranks)]
        outcomes[job] = next((one for one in theirs if one != "right"), "right")
    return outcomes


def outcomes_of(pool, jobs, together=8):
    """Several in one run of the pool, for starting ranks costs; those of a run that fails one by one. In pipelines the ranks on
    which nothing is refused wait, so these run alone from the start."""
    alone = [job for job in jobs if job[2] == "pp" and REFUSED["pp"].get(job[0]) in (OTHER_STAGE, BESIDE, AGAIN)]
    others, found = [job for job in jobs if job not in alone], {}
    for group in [others[k : k + together] for k in range(0, len(others), together)] + [[job] for job in alone]:
        try:
            found |= pool.run(2, in_turn, group, limit_s=20.0 + 5.0 * len(group))[0]
        except AssertionError as error:
            if len(group) > 1:
                found |= outcomes_of(pool, group, 1)
            else:
                reasons = re.findall(r"^RuntimeError: outcome: (.*?) :on one rank", f"{error}", re.S | re.M)
                found[group[0]] = reasons[-1] if reasons else f"hangs or ends: {error}"
    return found


def compare(pool, jobs, capsys=None):
    """All as in the tables, and what was expected to be refused may have become right."""
    found, bad = outcomes_of(pool, jobs), {}
    for name, head, axis in jobs:
        outcome, refused, broken = found[name, head, axis], REFUSED[axis].get(name), BROKEN.get(name)
        good = outcome == "right" or refused and outcome.startswith("refused") and refused in outcome
        if not good and not (broken and outcome.startswith("no reference") and broken in outcome):
            bad[name, head, axis] = outcome
        if capsys:
            with capsys.disabled():
                print(f"{axis}  {(head or name.removesuffix('Config')):36} {' '.join(outcome.split())[:180]}", flush=True)
    assert not bad, "\n".join(f"{job}: {outcome}" for job, outcome in bad.items())


def test_three_families(pool):
    compare(pool, [(name, "", axis) for name in ("LlamaConfig", "GPTNeoXConfig", "Gemma2Config") for axis in ("tp", "pp")])


OWN = {  # config class -> models, of which PLANS has plans
    "BertConfig": ["BertForMaskedLM"], "GPT2Config": ["GPT2LMHeadModel"],
    "RobertaConfig": ["RobertaForMaskedLM", "RobertaForSequenceClassification"], "XLMRobertaConfig": ["XLMRobertaForMaskedLM"],
    "CamembertConfig": ["CamembertForMaskedLM"], "ElectraConfig": ["ElectraForMaskedLM", "ElectraForSequenceClassification"],
    "DistilBertConfig": ["DistilBertForMaskedLM", "DistilBertForSequenceClassification"],
    "OPTConfig": ["OPTForCausalLM", "OPTForSequenceClassification"],
    "BloomConfig": ["BloomForCausalLM", "BloomForSequenceClassification"], "ViTConfig": ["ViTForImageClassification"],
}


@pytest.mark.sweep
def test_own_plans(pool, capsys):
    compare(pool, [(name, head, axis) for name, heads in OWN.items() for head in heads for axis in MESHES], capsys)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_declared_plans(pool, capsys, part):
    """A sixth of the 93 configs of transformers 5.24. A config that another release adds is expected to be right or refused."""
    compare(pool, [(name, "", axis) for name in sorted(dense_configs())[part::PARTS] for axis in MESHES], capsys)
