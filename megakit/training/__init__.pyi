from ..nemo.callbacks import BestValue as BestValue, StopOnSignal as StopOnSignal
from ..nemo.fit import train as train
from ..nemo.losses import (
    LightningPassthroughPredictionMixin as LightningPassthroughPredictionMixin,
    MeanLossReduction as MeanLossReduction,
    PassthroughLossReduction as PassthroughLossReduction,
    SameSizeLossDict as SameSizeLossDict,
)
from ..nemo.metric_tracker import MetricTracker as MetricTracker
from ..nemo.optimizer import cosine_annealing as cosine_annealing, megatron_adam as megatron_adam
from ..nemo.prediction import PredictionWriter as PredictionWriter
from ..nemo.reporter import Reporter as Reporter
from ..nemo.step_loop import StepLoop as StepLoop
from ..nemo.strategy import ExactStrategy as ExactStrategy
from ..nemo.token_losses import TokenMeanLossReduction as TokenMeanLossReduction
from ..nemo.validation import ValidationMetric as ValidationMetric
from .means import (
    mean_over_data_parallel_ranks as mean_over_data_parallel_ranks,
    mean_over_samples as mean_over_samples,
    mean_reports as mean_reports,
    weighted_mean as weighted_mean,
)
from .outputs import Outputs as Outputs, OutputsOfRanks as OutputsOfRanks
from .predicted_classes import Predictions as Predictions
