"""A model's configuration and metadata as messages.

In: a loaded model. Out: `ModelConfig` and `TensorMetadata`. Invariant: what they say is what is checked and what runs,
so a configuration file reads the same settings from the answer.
"""

from proto import open_inference_pb2 as pb
from runtime.server.model import Model, Tensor
from runtime.server.settings import Batching, Every, Latest, QueuePolicy, Specific, VersionPolicy

PLATFORM = "onnxruntime_onnx"


def tensor_message(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    """Name, type and shape of an input or output."""
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype.wire, shape=tensor.wire_shape
    )


def config_message(model: Model) -> pb.ModelConfig:
    """The configuration that the model is served with."""
    settings = model.settings
    batched = settings.max_batch_size > 0
    config = pb.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend="onnxruntime",
        default_model_filename=settings.filename,
        version_policy=_version_policy(settings.version_policy),
        max_batch_size=settings.max_batch_size,
        input=[
            pb.ModelInput(
                name=tensor.name,
                data_type=tensor.datatype.config,
                dims=tensor.wire_shape[1:] if batched else tensor.wire_shape,
            )
            for tensor in model.inputs
        ],
        output=[
            pb.ModelOutput(
                name=tensor.name,
                data_type=tensor.datatype.config,
                dims=tensor.wire_shape[1:] if batched else tensor.wire_shape,
            )
            for tensor in model.outputs
        ],
        instance_group=[
            pb.ModelInstanceGroup(name=model.name, count=model.scheduler.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
        ],
    )
    if model.engine is not None:
        config.model_transaction_policy.decoupled = True
    if settings.batching is not None:
        config.dynamic_batching.CopyFrom(_batching(settings.batching))
    if settings.threads is not None:
        config.parameters["intra_op_thread_count"].string_value = str(settings.threads)
    return config


def _version_policy(policy: VersionPolicy) -> pb.ModelVersionPolicy:
    match policy:
        case Latest(count=count):
            return pb.ModelVersionPolicy(latest=pb.ModelVersionPolicy.Latest(num_versions=count))
        case Specific(versions=versions):
            return pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=versions))
        case Every():
            return pb.ModelVersionPolicy(all=pb.ModelVersionPolicy.All())


def _batching(batching: Batching) -> pb.ModelDynamicBatching:
    return pb.ModelDynamicBatching(
        preferred_batch_size=batching.preferred,
        max_queue_delay_microseconds=round(batching.passed_over * 1e6),
        priority_levels=batching.priorities,
        default_priority_level=batching.default_priority,
        default_queue_policy=_queue_policy(batching.policy),
        priority_queue_policy={level: _queue_policy(policy) for level, policy in batching.policies},
    )


def _queue_policy(policy: QueuePolicy) -> pb.ModelQueuePolicy:
    action = pb.ModelQueuePolicy.DELAY if policy.delay else pb.ModelQueuePolicy.REJECT
    return pb.ModelQueuePolicy(
        timeout_action=action,
        default_timeout_microseconds=round((policy.timeout or 0) * 1e6),
        allow_timeout_override=policy.override,
        max_queue_size=policy.largest,
    )
