//! The proxy's program: reads the settings, listens, serves until it is told to stop.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use openclaw_mcp_proxy::auth::{TokenHash, new_token};
use openclaw_mcp_proxy::demo::Demo;
use openclaw_mcp_proxy::process::{self, Audit};
use openclaw_mcp_proxy::proxy::{Reload, Server, config::Config, tenants::TenantsError};

/// Lends an app's tools to OpenClaw and any other MCP client. Settings are OPENCLAW_PROXY_* environment variables.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve (what happens without a command, too).
    Serve,
    /// Serve, and show the whole way: an app lends a tool, an MCP client calls it.
    Demo {
        /// Stop after the call.
        #[arg(long)]
        once: bool,
    },
    /// Print a new token and its hash, for the settings or for a file of tenants.
    Token,
    /// Ask the proxy that runs with these settings whether it is well; the exit code says.
    Health,
}

/// EX_CONFIG of sysexits.h: something is wrong with the settings, and trying again does not help.
const EXIT_CONFIG: u8 = 78;
/// How long the proxy may take to say that it is well.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the last lines of the audit log may take to be written.
const AUDIT_GRACE: Duration = Duration::from_secs(2);
/// How long threads may take to end that wait for a disk or a name; the process ends without them.
const THREAD_GRACE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return fail(1, &format!("cannot start: {error}")),
    };
    let code = runtime.block_on(begin(Cli::parse()));
    runtime.shutdown_timeout(THREAD_GRACE);
    code
}

async fn begin(cli: Cli) -> ExitCode {
    // Before anything that takes time: until then the signal ends the process.
    let serves = matches!(cli.command, None | Some(Command::Serve));
    let hangups = match serves.then(hangups).transpose() {
        Ok(hangups) => hangups,
        Err(error) => return fail(1, &format!("cannot listen to signals: {error}")),
    };
    if let Some(Command::Token) = cli.command {
        return match print_token(&mut io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(1, &error.to_string()),
        };
    }
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => return fail(EXIT_CONFIG, &error.to_string()),
    };
    // Asking another process is no deed.
    let audit_file = config.audit_file.clone().filter(|_| !matches!(cli.command, Some(Command::Health)));
    let audit = match audit_file.map(Audit::open).transpose() {
        Ok(audit) => audit,
        Err(error) => return fail(EXIT_CONFIG, &format!("OPENCLAW_PROXY_AUDIT_FILE cannot be written: {error}.")),
    };
    if let Err(error) = process::init_logging(&config.log, config.log_format, audit.clone()) {
        return fail(EXIT_CONFIG, &error);
    }
    let ended = run(cli.command.unwrap_or(Command::Serve), config, audit.clone(), hangups).await;
    if let Some(audit) = audit {
        audit.flush(AUDIT_GRACE);
    }
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(if error.is::<TenantsError>() { EXIT_CONFIG } else { 1 }, &format!("{error:#}")),
    }
}

#[expect(clippy::print_stderr, reason = "the one sentence with which the program ends")]
fn fail(code: u8, message: &str) -> ExitCode {
    eprintln!("openclaw-mcp-proxy: {message}");
    ExitCode::from(code)
}

async fn run(command: Command, config: Config, audit: Option<Audit>, hangups: Option<Hangups>) -> anyhow::Result<()> {
    if matches!(command, Command::Health) {
        return health(&config).await;
    }
    let shutdown = process::shutdown_token()?;
    let warnings = config.warnings();
    let server = bind(&config, matches!(command, Command::Demo { .. })).await?;
    let base_url = format!("http://{}", server.local_addr()?);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), url = %base_url, "listening");
    if let Some(address) = server.admin_addr() {
        tracing::info!(admin = %format_args!("http://{address}"), "listening for the operator");
    }
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match command {
        Command::Serve | Command::Health | Command::Token => {
            let _reloading = hangups.map(|hangups| reload_on_hangup(server.reload(), audit, hangups));
            server.run(shutdown).await;
        }
        Command::Demo { once } => {
            let demo = Demo { base_url, app_token: config.app_token, openclaw_token: config.openclaw_token };
            let server = tokio::spawn(server.run(shutdown.clone()));
            let stay = async {
                if !once {
                    shutdown.cancelled().await
                }
            };
            let result = demo.run(&mut io::stdout(), stay).await;
            shutdown.cancel();
            server.await?;
            result?;
        }
    }
    Ok(())
}

fn print_token(out: &mut impl Write) -> io::Result<()> {
    let token = new_token()?;
    writeln!(out, "token:   {token}\nSHA-256: {}", TokenHash::of(token.as_bytes()))?;
    out.flush()
}

#[cfg(unix)]
type Hangups = tokio::signal::unix::Signal;
#[cfg(not(unix))]
type Hangups = ();

/// What says that SIGHUP has come.
#[cfg(unix)]
fn hangups() -> io::Result<Hangups> {
    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())
}

#[cfg(not(unix))]
fn hangups() -> io::Result<Hangups> {
    Ok(())
}

/// Reads the file of tenants again, and opens the audit log anew, whenever SIGHUP comes; the task ends with what is returned.
#[cfg(unix)]
fn reload_on_hangup(mut reload: Reload, audit: Option<Audit>, mut hangups: Hangups) -> tokio::task::JoinSet<()> {
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move {
        while hangups.recv().await.is_some() {
            if let Some(audit) = &audit {
                audit.reopen();
            }
            match reload.run().await {
                Ok(news) => tracing::info!("{news}"),
                Err(error) => tracing::error!("{error} What was read before stays in force."),
            }
        }
    });
    task
}

#[cfg(not(unix))]
fn reload_on_hangup(_: Reload, _: Option<Audit>, (): Hangups) {}

async fn health(config: &Config) -> anyhow::Result<()> {
    let mut address = config.listen;
    if address.ip().is_unspecified() {
        let is_v4 = address.is_ipv4();
        address.set_ip(if is_v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    let http = reqwest::Client::builder().timeout(HEALTH_TIMEOUT).no_proxy().build()?;
    let answer = http.get(format!("http://{address}/health")).send().await?.error_for_status()?.text().await?;
    anyhow::ensure!(answer == "ok", "it answered something else than ok");
    Ok(())
}

/// Listens where the settings say; the demo takes any port if the default one is taken.
async fn bind(config: &Config, any_port: bool) -> anyhow::Result<Server> {
    match Server::bind(config.clone()).await {
        Err(error)
            if any_port && error.kind() == io::ErrorKind::AddrInUse && config.listen == Config::default().listen =>
        {
            let mut free = config.clone();
            free.listen.set_port(0);
            Server::bind(free).await.context("cannot listen on any port")
        }
        result => result.map_err(|error| match error.downcast::<TenantsError>() {
            Ok(error) => error.into(),
            Err(error) => anyhow::Error::from(error).context(format!(
                "cannot listen on {}; stop the program that does, or set OPENCLAW_PROXY_LISTEN",
                config.listen
            )),
        }),
    }
}
