from services.gateway.service import GatewayService
from shared.config.gateway import GatewayConfig
from shared.service import main

if __name__ == "__main__":
    main("gateway", GatewayConfig, GatewayService)
