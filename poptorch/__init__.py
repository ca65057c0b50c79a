"""PyTorch models as explicit graphs."""

from poptorch import optim, profiling
from poptorch.ambient import isRunningOnIpu
from poptorch.executor import PoplarExecutor, inferenceModel, trainingModel
from poptorch.ops import identity_loss
from poptorch.options import Options
from poptorch.enums import *
