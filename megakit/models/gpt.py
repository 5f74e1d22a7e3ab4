"""Provides Megatron's `GPTModel` with initial weights that do not depend on the layout."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megakit.errors import UserError
from megakit.models.layers import _ColumnParallel, seeded
from megakit.models.transformer import SeededTransformerLayer


class SeededGPTModel(GPTModel):
    """A `GPTModel` whose initial weights depend on the config's seed and the weights' names only.

    Args:
        config: The model's config; its `seed` determines the initial weights.
        transformer_layer_spec: The layers, from `transformer_block_spec`.
        **options: Options of `GPTModel`.

    Raises:
        UserError: The layers are not seeded.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec,
        **options: Any,
    ) -> None:
        # The embedding is the first layer that draws from this seed. The later layers have their
        # own seeds.
        with seeded(config.seed, "embedding"):
            super().__init__(config, transformer_layer_spec, **options)
        kinds = {type(layer) for layer in self.decoder.layers}
        unseeded = [kind.__name__ for kind in kinds if not issubclass(kind, SeededTransformerLayer)]
        if self.mtp_process:
            unseeded.append("mtp_block_spec")
        if unseeded:
            raise UserError(
                f"{type(self).__name__}: the initial weights of {', '.join(unseeded)} depend on "
                "the layout. Use only the layers of megakit.models.transformer_block_spec."
            )

    def setup_embeddings_and_output_layer(self) -> None:
        """Builds the output layer again, seeded by name; then ties it to the embedding."""
        if self.post_process:
            with seeded(self.config.seed, "output layer"):
                self.output_layer = _ColumnParallel(
                    self.config.hidden_size,
                    self.vocab_size,
                    config=self.config,
                    init_method=self.config.init_method,
                    bias=False,
                    gather_output=not self.parallel_output,
                    skip_weight_param_allocation=self.pre_process
                    and self.share_embeddings_and_output_weights,
                    embedding_activation_buffer=self.embedding_activation_buffer,
                    grad_output_buffer=self.grad_output_buffer,
                    tp_group=self.pg_collection.tp,
                )
        super().setup_embeddings_and_output_layer()
