"""What the papers measured: unit, meaning, and the column of ours that measures the same."""

from dataclasses import dataclass

TOP1, ACCURACY = "top-1, evaluator 1", "accuracy"


@dataclass(frozen=True)
class PublishedMetric:
    """A column of the papers; `ours` is how the column of our seed table begins, "" for none."""

    unit: str
    meaning: str
    ours: str = ""


METRICS = {
    "test_acc": PublishedMetric("percent", "accuracy of the target", ACCURACY),
    "attack_acc1": PublishedMetric("percent", "top-1 of the evaluator on reconstructions", TOP1),
    "attack_acc5": PublishedMetric("percent", "top-5 of the evaluator on reconstructions"),
    "fid": PublishedMetric("fid", "Fréchet distance of reconstructions and private images"),
    "knn_dist": PublishedMetric("l2_feature", "distance to the nearest private image"),
    "l2_dist": PublishedMetric("l2_feature", "distance to the mean of private images"),
    "delta_eval": PublishedMetric("l2_feature", "distance to the nearest image, by the evaluator"),
    "delta_face": PublishedMetric("l2_feature", "distance to the nearest image, by FaceNet"),
    "delta_test_acc": PublishedMetric("percentage points", "change of test_acc by the defense"),
    "delta_attack_acc1": PublishedMetric("percentage points", "change of attack_acc1"),
    "tradeoff_ratio": PublishedMetric("ratio", "change of attack_acc1 over that of test_acc"),
    "kes": PublishedMetric("percent", "knowledge extraction score", "knowledge"),
    "face_sim": PublishedMetric("cosine", "similarity of faces in an embedder", "similarity"),
    "feature_sim": PublishedMetric("cosine", "similarity of embeddings predicted from features"),
    "ssim": PublishedMetric("ssim", "structural similarity of reconstruction and image"),
    "psnr": PublishedMetric("dB", "peak signal-to-noise ratio of reconstructions"),
    "mcc": PublishedMetric("mcc", "Matthews correlation of predicted attributes", "MCC"),
    "mcc_smiling": PublishedMetric("mcc", "the same, of the attribute Smiling"),
    "within_var": PublishedMetric("variance", "variance of features within a person"),
    "between_var": PublishedMetric("variance", "variance of features between people"),
    "lda_score": PublishedMetric("ratio", "ratio of these variances"),
    "eval_acc": PublishedMetric("percent", "top-1 of the evaluator on reconstructions", TOP1),
    "auc_mean": PublishedMetric("percent", "mean AUC of predicted attributes", "AUC"),
    "asr_untargeted": PublishedMetric("percent", "success of untargeted adversarial examples"),
    "asr_targeted": PublishedMetric("percent", "success of targeted adversarial examples"),
    "attack_success_rate": PublishedMetric("percent", "success of a backdoor"),
    "clean_acc": PublishedMetric("percent", "accuracy of a model that was not poisoned"),
    "head_in": PublishedMetric("", "inputs of a matrix of the head"),
    "head_out": PublishedMetric("", "outputs of a matrix of the head"),
    "head_rank": PublishedMetric("", "rank of a matrix of the head"),
    "toy_l2": PublishedMetric("l2_input", "distance of the attack's result to the sample"),
    "train_time": PublishedMetric("seconds", "training time"),
    "time_ratio": PublishedMetric("ratio", "training time over that of the undefended model"),
    "user_preference": PublishedMetric("percent", "share of people who prefer its images"),
    "recall": PublishedMetric("", "recall of people who name the identity"),
    "precision": PublishedMetric("", "precision of people who name the identity"),
    "f1": PublishedMetric("", "harmonic mean of these two"),
    "macro_f1": PublishedMetric("", "mean of f1 over the options"),
}
# What decides whether a table is reproduced, and what it costs: the first that a table has.
LEAKS = ("attack_acc1", "kes", "face_sim", "eval_acc")
UTILITIES = ("test_acc", "mcc", "auc_mean")
