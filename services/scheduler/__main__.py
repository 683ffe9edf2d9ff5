from services.scheduler.service import SchedulerService
from shared.config.scheduler import SchedulerConfig
from shared.service import main

if __name__ == "__main__":
    main("scheduler", SchedulerConfig, SchedulerService)
