"""Records a run during training: rows, checkpoints and exported weights. Their order leaves no gaps or duplicates after
a crash.

The rows of a step from all ranks are on disk before a checkpoint of that step gets its name. So a run that resumes from
a checkpoint has every row up to it; later rows belong to an attempt that the new one supersedes. The rank that holds a
response writes its row and its tokens. A kill between two ranks leaves no half step: the rows of one rank count once
all ranks have written.
"""
