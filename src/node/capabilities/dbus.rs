//! The desktop's services on Linux, over D-Bus.

use std::time::Duration;

use zbus::Connection;
use zbus::connection::Builder;

/// How long a service may take to answer.
const METHOD_TIMEOUT: Duration = Duration::from_secs(25);

/// A new connection to the bus of the user's session, or to the one at `address`. It ends when it is dropped.
///
/// # Errors
/// If there is no such bus.
pub(super) async fn session(address: Option<&str>) -> zbus::Result<Connection> {
    connect(address.map_or_else(Builder::session, Builder::address)).await
}

/// A new connection to the bus of the machine, or to the one at `address`. It ends when it is dropped.
///
/// # Errors
/// If there is no such bus.
pub(super) async fn system(address: Option<&str>) -> zbus::Result<Connection> {
    connect(address.map_or_else(Builder::system, Builder::address)).await
}

async fn connect(bus: Builder<'_>) -> zbus::Result<Connection> {
    bus.method_timeout(METHOD_TIMEOUT).build().await
}
