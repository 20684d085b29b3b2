"""How tensor parallelism cuts a parameter. Without it every parameter is Unique: one shard, the whole atom."""
