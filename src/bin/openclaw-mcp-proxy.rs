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
use openclaw_mcp_proxy::proxy::{Server, config::Config, tenants::TenantsError};

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

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
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
    let audit = match config.audit_file.clone().map(Audit::open).transpose() {
        Ok(audit) => audit,
        Err(error) => return fail(EXIT_CONFIG, &format!("OPENCLAW_PROXY_AUDIT_FILE cannot be written: {error}.")),
    };
    if let Err(error) = process::init_logging(&config.log, config.log_format, audit.clone()) {
        return fail(EXIT_CONFIG, &error);
    }
    match run(cli.command.unwrap_or(Command::Serve), config, audit).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("{error:#}")),
    }
}

#[expect(clippy::print_stderr, reason = "the one sentence with which the program ends")]
fn fail(code: u8, message: &str) -> ExitCode {
    eprintln!("openclaw-mcp-proxy: {message}");
    ExitCode::from(code)
}

async fn run(command: Command, config: Config, audit: Option<Audit>) -> anyhow::Result<()> {
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
            let _reloading = reload_on_hangup(server.reload(), audit)?;
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

/// Reads the file of tenants again, and opens the audit log anew, whenever SIGHUP comes; the task ends with what is returned.
#[cfg(unix)]
fn reload_on_hangup(
    reload: impl Fn() -> Result<String, TenantsError> + Send + 'static,
    audit: Option<Audit>,
) -> io::Result<tokio::task::JoinSet<()>> {
    let mut hangups = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move {
        while hangups.recv().await.is_some() {
            if let Some(Err(error)) = audit.as_ref().map(Audit::reopen) {
                tracing::error!(%error, "the audit log cannot be opened anew; the old file is written on");
            }
            match reload() {
                Ok(news) => tracing::info!("{news}"),
                Err(error) => tracing::error!("{error} What was read before stays in force."),
            }
        }
    });
    Ok(task)
}

#[cfg(not(unix))]
fn reload_on_hangup<T>(_: T, _: Option<Audit>) -> io::Result<()> {
    Ok(())
}

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
        result => result.with_context(|| {
            format!("cannot listen on {}; stop the program that does, or set OPENCLAW_PROXY_LISTEN", config.listen)
        }),
    }
}
