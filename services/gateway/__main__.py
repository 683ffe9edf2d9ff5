from services.gateway.service import GatewayService
from shared.process.service import main
from shared.settings.gateway import GatewayConfig

if __name__ == "__main__":
    main("gateway", GatewayConfig, GatewayService)
