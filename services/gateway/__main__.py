"""``python -m services.gateway``"""

from services.gateway.service import GatewayService
from shared.config import GatewayConfig
from shared.service import main

main("gateway", GatewayConfig, GatewayService)
