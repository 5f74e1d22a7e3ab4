from .callbacks import BestValue as BestValue, StopOnSignal as StopOnSignal
from .fit import train as train
from .losses import (
    LightningPassthroughPredictionMixin as LightningPassthroughPredictionMixin,
    MeanLossReduction as MeanLossReduction,
    PassthroughLossReduction as PassthroughLossReduction,
    SameSizeLossDict as SameSizeLossDict,
    mean_over_data_parallel_ranks as mean_over_data_parallel_ranks,
    mean_over_samples as mean_over_samples,
    mean_reports as mean_reports,
)
from .metric_tracker import MetricTracker as MetricTracker
from .optimizer import cosine_annealing as cosine_annealing, megatron_adam as megatron_adam
from .predicted_classes import Predictions as Predictions
from .prediction import Outputs as Outputs, PredictionWriter as PredictionWriter
from .reporter import Reporter as Reporter
from .step_loop import StepLoop as StepLoop
from .strategy import ExactStrategy as ExactStrategy
from .token_losses import TokenMeanLossReduction as TokenMeanLossReduction
from .validation import ValidationMetric as ValidationMetric
