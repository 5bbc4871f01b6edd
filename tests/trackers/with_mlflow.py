# /// script
# dependencies = ["mlflow==3.17.2"]
# ///
"""MLflow with a store in a file (`MLFLOW_TRACKING_URI`)."""

from mlflow import MlflowClient

from lightning_proxy.trainer.report.trackers import PROJECT
from support.tracked import LOSS, Kept, main


def read() -> Kept:
    client = MlflowClient()
    experiment = client.get_experiment_by_name(PROJECT)
    found = client.search_runs([experiment.experiment_id])
    return {
        run.info.run_id: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, LOSS)]
        for run in found
    }


if __name__ == "__main__":
    main("mlflow", read)
