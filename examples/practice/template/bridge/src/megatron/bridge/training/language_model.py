"""A small language model on synthetic text, trained for real with numpy: next token from the two before it."""

import math

import numpy as np

VOCABULARY = 64
WIDTH = 32
HIDDEN = 64
BATCH = 2048


class SyntheticText:
    """Tokens of a fixed random grammar; what is drawn from it depends on the seed."""

    def __init__(self, seed):
        grammar = np.random.default_rng(7)
        logits = 2.4 * grammar.standard_normal((VOCABULARY, VOCABULARY))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        self._thresholds = shares.cumsum(axis=1)
        self._random = np.random.default_rng(seed)

    def batch(self):
        """Pairs of tokens, shape (BATCH, 2), and the token that follows each, shape (BATCH,)."""
        pairs = self._random.integers(0, VOCABULARY, (BATCH, 2))
        draws = self._random.random(BATCH)
        following = (self._thresholds[pairs[:, 1]] < draws[:, None]).sum(axis=1)
        return pairs, np.minimum(following, VOCABULARY - 1)


class LanguageModel:
    """Embedding, one hidden layer, output layer; parameters are float32 arrays by their names in a checkpoint."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.parameters = {
            "embedding.word_embeddings.weight": _normal(random, (VOCABULARY, WIDTH), 1.0),
            "decoder.layers.mlp.linear_fc1.weight": _normal(random, (HIDDEN, 2 * WIDTH), (2 * WIDTH) ** -0.5),
            "decoder.layers.mlp.linear_fc1.bias": np.zeros(HIDDEN, np.float32),
            "decoder.layers.mlp.linear_fc2.weight": _normal(random, (WIDTH, HIDDEN), HIDDEN**-0.5),
            "output_layer.weight": _normal(random, (VOCABULARY, WIDTH), 0.1),
        }

    def loss_and_gradients(self, pairs, following):
        """Mean cross-entropy of a batch, and its gradient for every parameter."""
        embedding, fc1, bias, fc2, output = self.parameters.values()
        inputs = embedding[pairs].reshape(len(pairs), 2 * WIDTH)
        hidden = np.tanh(inputs @ fc1.T + bias)
        features = hidden @ fc2.T
        logits = features @ output.T
        logits -= logits.max(axis=1, keepdims=True)
        shares = np.exp(logits)
        shares /= shares.sum(axis=1, keepdims=True)
        rows = np.arange(len(pairs))
        loss = -np.log(np.maximum(shares[rows, following], 1e-30)).mean()

        shares[rows, following] -= 1.0
        d_logits = shares / len(pairs)
        d_features = d_logits @ output
        d_hidden = (d_features @ fc2) * (1.0 - hidden**2)
        d_inputs = (d_hidden @ fc1).reshape(len(pairs), 2, WIDTH)
        d_embedding = np.zeros_like(embedding)
        np.add.at(d_embedding, pairs, d_inputs)
        gradients = (
            d_embedding,
            d_hidden.T @ inputs,
            d_hidden.sum(axis=0),
            d_features.T @ hidden,
            d_logits.T @ features,
        )
        return float(loss), dict(zip(self.parameters, gradients, strict=True))


class Adam:
    """Adam with clipped gradients; its state is kept under the names that a checkpoint gives it."""

    def __init__(self, parameters, settings):
        self._settings = settings
        self._step = 0
        self.state = {
            f"optimizer.state.{moment}.{name}": np.zeros_like(value)
            for moment in ("exp_avg", "exp_avg_sq")
            for name, value in parameters.items()
        }

    def step(self, parameters, gradients, lr):
        """Change the parameters in place; return the gradients' norm before clipping."""
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        scale = min(1.0, self._settings["clip_grad"] / norm) if norm > 0 else 1.0
        beta1, beta2 = self._settings["adam_beta1"], self._settings["adam_beta2"]
        self._step += 1
        for name, gradient in gradients.items():
            mean, square = (self.state[f"optimizer.state.{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq"))
            mean += (1 - beta1) * (gradient * scale - mean)
            square += (1 - beta2) * ((gradient * scale) ** 2 - square)
            size = np.sqrt(square / (1 - beta2**self._step)) + self._settings["adam_eps"]
            parameters[name] -= lr * (mean / (1 - beta1**self._step)) / size
        return norm


def _normal(random, shape, deviation):
    return (deviation * random.standard_normal(shape)).astype(np.float32)


def learning_rate(iteration, config):
    """Warm-up, then half a cosine down to the least rate."""
    lr, least = config["optimizer"]["lr"], config["optimizer"]["min_lr"]
    decay = config["scheduler"]["lr_decay_iters"]
    warm_up = min(config["scheduler"]["lr_warmup_iters"], decay - 1)
    if iteration <= warm_up:
        return lr * iteration / warm_up
    done = min(1.0, (iteration - warm_up) / max(1, decay - warm_up))
    return least + (lr - least) * 0.5 * (1.0 + math.cos(math.pi * done))
