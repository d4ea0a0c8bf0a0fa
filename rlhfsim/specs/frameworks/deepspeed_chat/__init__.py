"""DeepSpeed-Chat, which is only read: published runs of 2023."""
