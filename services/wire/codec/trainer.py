"""The trainer's info <-> messages. Pure."""

from collections.abc import Sequence

from atoll.wire.codec.weights import decode_shard_layout, encode_shard_layout
from atoll.wire.info import TrainerInfo
from atoll.wire.v1 import trainer_pb2


def encode_trainer_info(info: TrainerInfo) -> trainer_pb2.TrainerInfoReply:
    """Layouts that several ranks share are sent once, if they are the same object."""
    shards = {id(shard_layout): shard_layout for shard_layout in info.shard_layouts}
    numbers = {shard: number for number, shard in enumerate(shards)}
    return trainer_pb2.TrainerInfoReply(
        model=info.model,
        world_size=info.world_size,
        tensor_parallel=info.tensor_parallel,
        pipeline_parallel=info.pipeline_parallel,
        context_parallel=info.context_parallel,
        expert_parallel=info.expert_parallel,
        data_parallel=info.data_parallel,
        num_parameters=info.num_parameters,
        vocab_size=info.vocab_size,
        tokenizer_digest=info.tokenizer_digest,
        shard_layouts=[encode_shard_layout(shard_layout) for shard_layout in shards.values()],
        shard_layout_of_rank=[numbers[id(shard_layout)] for shard_layout in info.shard_layouts],
        roles=info.roles,
    )


def decode_trainer_info(message: trainer_pb2.TrainerInfoReply) -> TrainerInfo:
    shards = [decode_shard_layout(boxes) for boxes in message.shard_layouts]
    return TrainerInfo(
        model=message.model,
        world_size=message.world_size,
        tensor_parallel=message.tensor_parallel,
        pipeline_parallel=message.pipeline_parallel,
        context_parallel=message.context_parallel,
        expert_parallel=message.expert_parallel,
        data_parallel=message.data_parallel,
        num_parameters=message.num_parameters,
        vocab_size=message.vocab_size,
        tokenizer_digest=message.tokenizer_digest,
        shard_layouts=tuple(shards[number] for number in message.shard_layout_of_rank),
        roles=tuple(message.roles),
    )


def join_trainer_infos(replies: Sequence[trainer_pb2.TrainerInfoReply]) -> trainer_pb2.TrainerInfoReply:
    """Rank 0's info with the shard layouts of all ranks; identical layouts are sent once."""
    info, numbers = trainer_pb2.TrainerInfoReply(), dict[bytes, int]()
    info.CopyFrom(replies[0])
    del info.shard_layouts[:], info.shard_layout_of_rank[:]
    for reply in replies:
        [boxes] = reply.shard_layouts
        number = numbers.setdefault(boxes.SerializeToString(deterministic=True), len(numbers))
        if number == len(info.shard_layouts):
            info.shard_layouts.append(boxes)
        info.shard_layout_of_rank.append(number)
    return info
