//! What a program of this package does before and after its work: logging, and hearing that it should stop.

pub mod audit;
pub mod file;
pub mod systemd;

use std::io::{IsTerminal, Write};

pub use audit::Audit;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// The version, and where it is known the commit in brackets.
pub const VERSION: &str = env!("OPENCLAW_VERSION");

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// What is logged.
///
/// # Errors
/// A sentence, if `filter` is malformed.
pub fn log_filter(filter: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(filter).map_err(|error| {
        format!("OPENCLAW_PROXY_LOG is not usable: {error}; write a level such as info, or directives such as info,openclaw_mcp_proxy=debug.")
    })
}

/// Sends log lines to stderr; stdout belongs to the program's output. Events of the target of `audit` go to its file
/// alone, or nowhere.
///
/// # Errors
/// A sentence, if `filter` is malformed.
pub fn init_logging(filter: &str, format: LogFormat, audit: Option<Audit>) -> Result<(), String> {
    let filter = log_filter(filter)?;
    // A closed stderr must not end the program, which is what complaining of it there would do.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let lines = match format {
        LogFormat::Human => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let not_audit = filter_fn(|metadata| metadata.target() != AUDIT_TARGET);
    let lines = lines.with_filter(filter.and(not_audit));
    let audit = audit.map(|audit| {
        let lines = tracing_subscriber::fmt::layer().json().flatten_event(true).with_current_span(false);
        let lines = lines.log_internal_errors(false);
        let lines = lines.with_span_list(false).with_target(false).with_level(false).with_writer(audit);
        lines.with_filter(filter_fn(|metadata| metadata.target() == AUDIT_TARGET))
    });
    // Only one subscriber can be set, and in a test another one may have been.
    let _already_set = tracing_subscriber::registry().with(lines).with(audit).try_init();
    Ok(())
}

/// Writes the sentence with which a program ends. If nobody reads stderr any more, the program's code still counts.
pub fn last_words(sentence: &str) {
    let _unheard = writeln!(std::io::stderr(), "{sentence}");
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

/// Prints what `shell` needs to complete a program's commands and flags.
///
/// # Errors
/// If `out` cannot be written.
pub fn print_completions(
    mut command: clap::Command,
    shell: clap_complete::Shell,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let name = command.get_name().to_owned();
    // By way of a buffer, because it would panic at a pipe that is closed.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    out.write_all(&script)?;
    out.flush()
}

/// The target of events for the audit log.
pub const AUDIT_TARGET: &str = "openclaw_audit";

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
