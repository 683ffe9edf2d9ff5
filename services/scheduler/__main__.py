from services.scheduler.service import SchedulerService
from shared.process.service import main
from shared.settings.scheduler import SchedulerConfig

if __name__ == "__main__":
    main("scheduler", SchedulerConfig, SchedulerService)
