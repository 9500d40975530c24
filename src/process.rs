//! What a program of this package does before and after its work: logging, and hearing that it should stop.

use std::io::IsTerminal;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// Sends log lines to stderr; stdout belongs to the program's output.
///
/// # Errors
/// A sentence, if `filter` is malformed.
pub fn init_logging(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| format!("OPENCLAW_PROXY_LOG is not usable: {error}."))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Only one subscriber can be set, and in a test another one may have been.
    let _already_set = match format {
        LogFormat::Human => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}

/// A command whose flags take no empty variable for a value: an empty one counts as not set.
pub fn without_empty_variables(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match arg.get_env() {
        Some(name) if std::env::var_os(name).is_some_and(|value| value.is_empty()) => {
            arg.env(clap::builder::Resettable::<clap::builder::OsStr>::Reset)
        }
        _ => arg,
    });
    command.mut_subcommands(without_empty_variables)
}

/// A token that ends at the first signal to stop (SIGINT or SIGTERM; Ctrl-C, close or shutdown on Windows). The
/// second signal ends the process at once.
///
/// # Errors
/// If the signals cannot be listened to.
pub fn shutdown_token() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut signals = Signals::new()?;
    let signalled = token.clone();
    // Ends with the process.
    tokio::spawn(async move {
        signals.next().await;
        signalled.cancel();
        signals.next().await;
        tracing::warn!("second signal: stopping at once");
        std::process::exit(130);
    });
    Ok(token)
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(windows)]
struct Signals {
    ctrl_c: tokio::signal::windows::CtrlC,
    close: tokio::signal::windows::CtrlClose,
    shutdown: tokio::signal::windows::CtrlShutdown,
}

#[cfg(windows)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::windows::{ctrl_c, ctrl_close, ctrl_shutdown};
        Ok(Signals { ctrl_c: ctrl_c()?, close: ctrl_close()?, shutdown: ctrl_shutdown()? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.ctrl_c.recv() => {}
            _ = self.close.recv() => {}
            _ = self.shutdown.recv() => {}
        }
    }
}
