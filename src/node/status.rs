//! How the node's two transports are: what they do, not what they are set to.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The local MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LocalMcp {
    /// It is switched off.
    #[default]
    Disabled,
    /// It listens.
    Listening(SocketAddr),
    /// It should listen and does not, and why.
    Failed(String),
    /// It has ended.
    Stopped,
}

/// The bridge.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Bridge {
    /// It is switched off.
    #[default]
    Disabled,
    /// It is being registered or connected.
    Connecting,
    /// Calls can come.
    Connected,
    /// It does not work now, and why; another attempt follows.
    Waiting(String),
    /// It has ended for good, and why.
    Failed(String),
    /// It was told to end.
    Stopped,
}

/// Both, as everybody may ask at any time.
#[derive(Debug, Default)]
pub struct Status {
    now: Mutex<Now>,
    /// Somebody wants the bridge to connect again.
    pub reconnect: Notify,
}

/// How things are.
#[derive(Debug, Clone, Default)]
pub struct Now {
    /// The local MCP server.
    pub local_mcp: LocalMcp,
    /// The bridge.
    pub bridge: Bridge,
    /// Where MCP clients find what is lent.
    pub mcp_url: Option<String>,
}

impl Status {
    /// How things are now.
    pub fn now(&self) -> Now {
        self.lock().clone()
    }

    /// The local MCP server is otherwise.
    pub fn set_local_mcp(&self, local_mcp: LocalMcp) {
        self.lock().local_mcp = local_mcp;
    }

    /// The bridge is otherwise.
    pub fn set_bridge(&self, bridge: Bridge) {
        self.lock().bridge = bridge;
    }

    /// There is another session; without one, nothing is lent.
    pub fn set_mcp_url(&self, mcp_url: Option<String>) {
        self.lock().mcp_url = mcp_url;
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
