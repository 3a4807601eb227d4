from reverb_writer.ray.actor_target import ActorTarget as ActorTarget
from reverb_writer.ray.cluster import ReplayCluster as ReplayCluster
from reverb_writer.ray.shard_report import ClusterStatus as ClusterStatus
from reverb_writer.ray.shard_report import ShardReport as ShardReport
from reverb_writer.ray.shard_report import ShardStartError as ShardStartError
