"""The model: a vision encoder, a projection, and a language model that reads pictures and tokens."""

import argparse
from dataclasses import dataclass

import numpy as np
from examples.mimo.training.language_model import HIDDEN, VOCABULARY, WIDTH, Adam

PIXELS = 24
PICTURES = 8
TOKENS_PER_SAMPLE = 32

ENCODER = "modality_submodules.images.encoders.radio_encoder.weight"
PROJECTION = "modality_submodules.images.input_projections.0.weight"
ROUTER = "language_model.decoder.layers.mlp.router.weight"


def add_model_provider_args(parser):
    """Add the flags of the model."""
    group = parser.add_argument_group("model provider")
    group.add_argument("--model-provider", choices=["hetero-vlm", "nemotron-moe-vlm"], default="nemotron-moe-vlm")
    group.add_argument("--training-stage", choices=["stage1", "stage2", "stage3"], default="stage2")
    group.add_argument("--freeze-projection", action="store_true")
    group.add_argument("--num-layers", type=int, default=20)
    group.add_argument("--hidden-size", type=int, default=2688)
    group.add_argument("--hybrid-layer-pattern", default=None)
    group.add_argument("--num-moe-experts", type=int, default=0)
    group.add_argument("--seq-length", type=int, default=8192)
    group.add_argument("--vocab-size", type=int, default=131072)
    group.add_argument("--tokenizer-model", default=None)
    group.add_argument("--image-token-id", type=int, default=511)
    group.add_argument("--num-image-tiles", type=int, default=None)
    group.add_argument("--use-thumbnail", action="store_true")
    group.add_argument("--dynamic-resolution", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--dynamic-resolution-min-patches", type=int, default=None)
    group.add_argument("--dynamic-resolution-max-patches", type=int, default=None)
    return parser


def trainable(args, names):
    """The parameters that the training stage leaves free: in stage 1 the projection alone.

    Raises:
        ValueError: Nothing is left to train.

    """
    free = [name for name in names if name != ROUTER]
    if args.training_stage == "stage1":
        free = [PROJECTION]
    if args.freeze_projection:
        free = [name for name in free if name != PROJECTION]
    if not free:
        raise ValueError("stage1 with --freeze-projection leaves nothing to train")
    return frozenset(free)


@dataclass(frozen=True)
class Batch:
    """Pictures, shape (rows, PIXELS); tokens and those that follow them, shape (rows,)."""

    pictures: np.ndarray
    tokens: np.ndarray
    following: np.ndarray

    def split(self, parts):
        """Near-equal parts, in order."""
        pieces = (np.array_split(field, parts) for field in (self.pictures, self.tokens, self.following))
        return [Batch(*fields) for fields in zip(*pieces, strict=True)]


class MockPictures:
    """Pictures of a few things with a caption each. What an iteration sees depends on the seed and its number alone."""

    def __init__(self, seed):
        fixed = np.random.default_rng(11)
        self._prototypes = fixed.standard_normal((PICTURES, PIXELS))
        logits = 1.8 * fixed.standard_normal((VOCABULARY, VOCABULARY))
        bias = 1.5 * fixed.standard_normal((PICTURES, VOCABULARY))
        shares = np.exp(logits[None] + bias[:, None])
        self._thresholds = (shares / shares.sum(axis=2, keepdims=True)).cumsum(axis=2)
        self._seed = seed

    def batch(self, iteration, samples):
        """Return the samples of one iteration, as rows of one token each."""
        random = np.random.default_rng((self._seed, iteration))
        rows = samples * TOKENS_PER_SAMPLE
        shown = random.integers(0, PICTURES, samples).repeat(TOKENS_PER_SAMPLE)
        pictures = self._prototypes[shown] + 0.3 * random.standard_normal((rows, PIXELS))
        tokens = random.integers(0, VOCABULARY, rows)
        following = (self._thresholds[shown, tokens] < random.random(rows)[:, None]).sum(axis=1)
        return Batch(pictures.astype(np.float32), tokens, np.minimum(following, VOCABULARY - 1))


class ResumableAdam(Adam):
    """Adam that can go on where a checkpoint ended."""

    def resume_after(self, steps):
        """Count these steps as done."""
        self._step = steps


class VisionLanguageModel:
    """Parameters are float32 arrays by their names in a checkpoint."""

    def __init__(self, seed, experts):
        random = np.random.default_rng(seed)

        def normal(shape, deviation):
            return (deviation * random.standard_normal(shape)).astype(np.float32)

        self.parameters = {
            ENCODER: normal((WIDTH, PIXELS), PIXELS**-0.5),
            PROJECTION: normal((WIDTH, WIDTH), WIDTH**-0.5),
            "language_model.embedding.word_embeddings.weight": normal((VOCABULARY, WIDTH), 1.0),
            "language_model.decoder.layers.mlp.linear_fc1.weight": normal((HIDDEN, WIDTH), WIDTH**-0.5),
            "language_model.decoder.layers.mlp.linear_fc2.weight": normal((WIDTH, HIDDEN), HIDDEN**-0.5),
            "language_model.output_layer.weight": normal((VOCABULARY, WIDTH), 0.1),
        }
        if experts:
            self.parameters[ROUTER] = normal((experts, WIDTH), WIDTH**-0.5)

    def loss_and_gradients(self, batch):
        """Summed cross-entropy of a batch, and the gradient of that sum for every parameter but the router's."""
        encoder, projection, embedding, fc1, fc2, output = list(self.parameters.values())[:6]
        seen = np.tanh(batch.pictures @ encoder.T)
        inputs = embedding[batch.tokens] + seen @ projection.T
        hidden = np.tanh(inputs @ fc1.T)
        features = inputs + hidden @ fc2.T
        logits = features @ output.T
        logits -= logits.max(axis=1, keepdims=True)
        shares = np.exp(logits)
        shares /= shares.sum(axis=1, keepdims=True)
        rows = np.arange(len(batch.tokens))
        loss = -np.log(np.maximum(shares[rows, batch.following], 1e-30)).sum()

        shares[rows, batch.following] -= 1.0
        d_features = shares @ output
        d_hidden = (d_features @ fc2) * (1.0 - hidden**2)
        d_inputs = d_features + d_hidden @ fc1
        d_embedding = np.zeros_like(embedding)
        np.add.at(d_embedding, batch.tokens, d_inputs)
        d_seen = (d_inputs @ projection) * (1.0 - seen**2)
        gradients = (
            d_seen.T @ batch.pictures,
            d_inputs.T @ seen,
            d_embedding,
            d_hidden.T @ inputs,
            d_features.T @ hidden,
            shares.T @ features,
        )
        return float(loss), dict(zip(self.parameters, gradients, strict=False))

    def load_balancing_loss(self, batch):
        """How unevenly tokens would be sent to the experts: 1 where each has its share; None without experts."""
        router = self.parameters.get(ROUTER)
        if router is None:
            return None
        embedding = self.parameters["language_model.embedding.word_embeddings.weight"]
        scores = embedding[batch.tokens] @ router.T
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        sent = np.bincount(scores.argmax(axis=1), minlength=len(router)) / len(scores)
        return float(len(router) * (sent * shares.mean(axis=0)).sum())
