//! `openclaw-node approvals`: the owner's way to say what may be run. It works on the policy file, so the node need
//! not run, and if it does, what is said counts from the next call on.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, Subcommand};
use serde_json::json;

use super::evaluate;
use super::executable::{self, Kind};
use super::location::Location;
use super::matcher::{self, Arguments};
use super::policy::{Ask, Entry, File, Policy, Security, agent_key};
use super::store::{Loaded, Store, StoreError};
use crate::node::token::{self, Identity};

/// The least letters of an id that stand for it.
const MIN_ID_LETTERS: usize = 4;
/// How many letters of an id are shown.
const SHOWN_ID_LETTERS: usize = 8;

/// The flags of `openclaw-node approvals`.
#[derive(Debug, Args)]
pub struct ApprovalsArgs {
    /// The installation whose policy is meant: release or dev
    #[arg(long, value_name = "NAME", env = "OPENCLAW_APP_IDENTITY", default_value = "release", value_parser = identity)]
    identity: Identity,
    #[command(subcommand)]
    action: Action,
}

fn identity(name: &str) -> Result<Identity, String> {
    Identity::parse(name.trim()).ok_or_else(|| "it must be 'release' or 'dev'".to_owned())
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what is in force, and the commands that are listed
    List {
        /// What is in force for this agent
        #[arg(long, value_name = "ID", default_value = "main")]
        agent: String,
        /// Print the policy as JSON
        #[arg(long)]
        json: bool,
    },
    /// List a command, so that it may be run
    Allow {
        /// For this agent; * stands for all. Callers say themselves which agent they are
        #[arg(long, value_name = "ID", default_value = "main")]
        agent: String,
        /// Only with arguments like these: a regular expression for all of them, joined by spaces
        #[arg(long, value_name = "REGEX", conflicts_with = "exact", allow_hyphen_values = true)]
        args_regex: Option<String>,
        /// A program, or a glob for its path: ** is any folders, * and ? stand for characters of one name
        program: String,
        /// Only with exactly these arguments, or none; must come last
        #[arg(long, value_name = "ARG", num_args = 0.., allow_hyphen_values = true)]
        exact: Option<Vec<String>>,
    },
    /// Take a command off the list
    Revoke {
        /// Only for this agent [default: for all]
        #[arg(long, value_name = "ID")]
        agent: Option<String>,
        /// The beginning of an entry's id, its pattern, or a program
        entry: String,
    },
    /// Change what is in force
    #[command(group = ArgGroup::new("what").args(["security", "ask", "ask_fallback"]).required(true).multiple(true))]
    Set {
        /// For this agent alone; * stands for all [default: for those who have no rule of their own]
        #[arg(long, value_name = "ID")]
        agent: Option<String>,
        /// Which commands may run
        #[arg(long, value_name = "WHICH")]
        security: Option<Security>,
        /// When somebody is to be asked. A node cannot ask, and does what the fallback says
        #[arg(long, value_name = "WHEN")]
        ask: Option<Ask>,
        /// Which commands may run when nobody can be asked
        #[arg(long, value_name = "WHICH")]
        ask_fallback: Option<Security>,
    },
    /// Tell what the node would decide about a command, without running it
    Check {
        /// On behalf of this agent
        #[arg(long, value_name = "ID", default_value = "main")]
        agent: String,
        /// The folder in which it would be run
        #[arg(long, value_name = "DIR")]
        cwd: Option<PathBuf>,
        /// The program, looked up on this shell's PATH, and its arguments
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// What was asked for is not possible.
    #[error("{0}")]
    Refused(String),
    /// The policy.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ApprovalsArgs {
    /// Does what is asked for, and prints what has come of it. Gives whether the answer is a good one.
    ///
    /// # Errors
    /// [`CliError`] if nothing was done.
    pub fn run(self, env: impl Fn(&str) -> Option<String>, out: &mut impl Write) -> Result<bool, CliError> {
        let token = token::path(self.identity, &env);
        let data = token.as_deref().and_then(Path::parent);
        let data = data.ok_or_else(|| refused("This user has no folder of settings: HOME is not set."))?;
        let store = Store::new(Location::new(data, env));
        let mut lines = Vec::new();
        let is_good = self.action.carry_out(&store, &mut lines)?;
        // Whoever closed our stdout does not want to know.
        let _closed = writeln!(out, "{}", lines.join("\n"));
        Ok(is_good)
    }
}

impl Action {
    fn carry_out(self, store: &Store, lines: &mut Vec<String>) -> Result<bool, CliError> {
        match self {
            Action::List { agent, json } => list(store, &agent, json, lines),
            Action::Allow { agent, args_regex, program, exact } => {
                let entry = new_entry(&program, args_regex.as_deref(), exact.as_deref())?;
                allow(store, &agent, entry, lines)
            }
            Action::Revoke { agent, entry } => revoke(store, agent.as_deref(), &entry, lines),
            Action::Set { agent, security, ask, ask_fallback } => {
                store.update(|file| {
                    let rules = match &agent {
                        Some(agent) => file.rules_mut(agent_key(Some(agent))),
                        None => file.defaults.get_or_insert_default(),
                    };
                    rules.security = security.or(rules.security);
                    rules.ask = ask.or(rules.ask);
                    rules.ask_fallback = ask_fallback.or(rules.ask_fallback);
                    true
                })?;
                tell_force(store, agent_key(agent.as_deref()), lines);
                Ok(true)
            }
            Action::Check { agent, cwd, command } => check(store, &agent, cwd.as_deref(), &command, lines),
        }
    }
}

fn refused(text: impl Into<String>) -> CliError {
    CliError::Refused(text.into())
}

fn list(store: &Store, agent: &str, as_json: bool, lines: &mut Vec<String>) -> Result<bool, CliError> {
    let file = match store.load() {
        Loaded::Policy { file, .. } => *file,
        Loaded::Missing => File::default(),
        Loaded::Unusable(why) => return Err(StoreError::Unusable(why).into()),
    };
    if as_json {
        let shown = json!({ "path": store.path().display().to_string(), "file": file.for_clients() });
        lines.push(format!("{shown:#}"));
        return Ok(true);
    }
    lines.push(format!("Policy: {}", store.path().display()));
    tell_force(store, agent_key(Some(agent)), lines);
    let rows: Vec<[String; 4]> = file
        .agents()
        .flat_map(|(agent, rules)| rules.allowlist.iter().flatten().map(move |entry| row(agent, entry)))
        .collect();
    if rows.is_empty() {
        lines.push("No command is listed. To list one: openclaw-node approvals allow PROGRAM".to_owned());
        return Ok(true);
    }
    lines.push(String::new());
    let header = ["ID", "AGENT", "PROGRAM", "ARGUMENTS"].map(str::to_owned);
    let widths = [0, 1, 2].map(|at| rows.iter().chain([&header]).map(|row| row[at].chars().count()).max().unwrap_or(0));
    for [id, agent, program, arguments] in [&header].into_iter().chain(&rows) {
        let [a, b, c] = widths;
        lines.push(format!("{id:a$}  {agent:b$}  {program:c$}  {arguments}"));
    }
    Ok(true)
}

fn row(agent: &str, entry: &Entry) -> [String; 4] {
    let id: String = entry.id.as_deref().unwrap_or("-").chars().take(SHOWN_ID_LETTERS).collect();
    [id, printable(agent), printable(&entry.pattern), arguments(entry)]
}

/// What an entry says about arguments.
fn arguments(entry: &Entry) -> String {
    match matcher::arguments(entry) {
        Arguments::Any => "any".to_owned(),
        Arguments::None => "none; this entry lists nothing, since it has lost its arguments".to_owned(),
        Arguments::Digest => "those of a digest".to_owned(),
        Arguments::Exactly(args) if args.is_empty() => "without".to_owned(),
        Arguments::Exactly(args) => {
            let text = executable::quoted(args.iter().map(String::as_str), executable::is_special);
            format!("exactly {}", printable(&text))
        }
        Arguments::Like(pattern) => format!("like {}", printable(pattern)),
    }
}

/// Nothing that a file holds may move a terminal's cursor.
fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Says what is in force for an agent, in words.
fn tell_force(store: &Store, agent: &str, lines: &mut Vec<String>) {
    let policy = store.policy(Some(agent));
    let Policy { security, ask, ask_fallback, .. } = &policy;
    let runs = |is_listed| evaluate::decide(&policy, is_listed, false).is_ok();
    let in_words = match (runs(true), runs(false)) {
        (_, true) => "every command runs",
        (true, false) => "listed commands run, and no others",
        (false, false) => "nothing runs",
    };
    lines.push(format!(
        "In force for {}: {in_words} (security {security}, ask {ask}, ask fallback {ask_fallback}).",
        printable(agent)
    ));
}

/// The entry for a command.
fn new_entry(program: &str, args_regex: Option<&str>, exact: Option<&[String]>) -> Result<Entry, CliError> {
    let pattern = pattern(program)?;
    let is_bound = args_regex.is_some() || exact.is_some();
    match executable::kind(Path::new(&pattern)) {
        Kind::Shell => {
            return Err(refused(format!(
                "{program} is never listed: it runs whatever it is told. List the program or the script itself."
            )));
        }
        Kind::Interpreter if !is_bound => {
            return Err(refused(format!(
                "{program} runs whatever its arguments say. List it with --exact or --args-regex."
            )));
        }
        Kind::Interpreter | Kind::Program => {}
    }
    let arg_pattern = match (args_regex, exact) {
        (Some(regex), _) => {
            // All of the arguments are meant, and an expression may have alternatives.
            let whole = format!("^(?:{regex})$");
            for expression in [regex, &whole] {
                matcher::compile(expression)
                    .map_err(|error| refused(format!("--args-regex cannot be used: {error}")))?;
            }
            Some(whole)
        }
        (None, Some(args)) => Some(matcher::exact(args)),
        (None, None) => None,
    };
    Ok(Entry { id: Some(uuid::Uuid::new_v4().to_string()), pattern, arg_pattern, ..Entry::default() })
}

/// The pattern for what somebody calls a program.
fn pattern(program: &str) -> Result<String, CliError> {
    if program.contains(['*', '?']) {
        return match matcher::pattern_problem(program) {
            Some(problem) => Err(refused(format!("{program} is not usable as a pattern: {problem}."))),
            None => Ok(program.trim().to_owned()),
        };
    }
    let argv = [program.to_owned()];
    let found = executable::resolve(&argv, None).map_err(|reason| {
        refused(match reason {
            "batch-file-not-supported" => format!("{program} is a batch file. Those are never run."),
            _ => format!("{program} is not found on PATH. Name it with its folder."),
        })
    })?;
    let path = found.called.to_string_lossy().into_owned();
    if path.contains(['*', '?']) {
        return Err(refused(format!("{program} has a name that patterns cannot tell from others.")));
    }
    Ok(path)
}

fn allow(store: &Store, agent: &str, entry: Entry, lines: &mut Vec<String>) -> Result<bool, CliError> {
    let agent = agent_key(Some(agent));
    let mut is_new = true;
    store.update(|file| {
        let entries = file.rules_mut(agent).allowlist.get_or_insert_default();
        is_new = !entries.iter().any(|other| other.key() == entry.key());
        if is_new {
            entries.push(entry.clone());
        }
        is_new
    })?;
    let what = format!("{} (arguments: {}) for {}", printable(&entry.pattern), arguments(&entry), printable(agent));
    lines.push(format!("{} {what}.", if is_new { "Listed" } else { "Already listed:" }));
    let is_there = entry.pattern.contains(['*', '?']) || Path::new(&entry.pattern).exists();
    if !is_there {
        lines.push("Note: there is no such program now.".to_owned());
    }
    tell_force(store, agent, lines);
    let policy = store.policy(Some(agent));
    let does_run = evaluate::decide(&policy, true, false).is_ok();
    if !does_run {
        let hint = if policy.security == Security::Deny { "--security allowlist" } else { "--ask-fallback allowlist" };
        lines.push(format!("Listed commands do not run now. To let them: openclaw-node approvals set {hint}"));
    }
    Ok(does_run)
}

fn revoke(store: &Store, agent: Option<&str>, wanted: &str, lines: &mut Vec<String>) -> Result<bool, CliError> {
    let agent = agent.map(|agent| agent_key(Some(agent)));
    let wanted = wanted.trim();
    let path = pattern(wanted).ok();
    let is_id =
        |entry: &Entry| wanted.len() >= MIN_ID_LETTERS && entry.id.as_deref().is_some_and(|id| id.starts_with(wanted));
    let is_pattern = |entry: &Entry| {
        let pattern = entry.pattern.trim().to_lowercase();
        [Some(wanted), path.as_deref()].into_iter().flatten().any(|name| name.to_lowercase() == pattern)
    };
    let mut gone = Vec::new();
    let mut is_ambiguous = false;
    store.update(|file| {
        let lists = file.agents.iter_mut().flatten().filter(|(name, _)| agent.is_none_or(|agent| agent == *name));
        let mut lists: Vec<_> = lists.filter_map(|(name, rules)| Some((name, rules.allowlist.as_mut()?))).collect();
        let by_id = lists.iter().flat_map(|(_, entries)| entries.iter()).filter(|entry| is_id(entry)).count();
        is_ambiguous = by_id > 1;
        if is_ambiguous {
            return false;
        }
        for (name, entries) in &mut lists {
            let is_gone = |entry: &mut Entry| if by_id > 0 { is_id(entry) } else { is_pattern(entry) };
            gone.extend(entries.extract_if(.., is_gone).map(|entry| (name.to_string(), entry)));
        }
        !gone.is_empty()
    })?;
    if is_ambiguous {
        return Err(refused(format!("More than one entry has an id that begins with {wanted}. Give more of it.")));
    }
    if gone.is_empty() {
        return Err(refused(format!("{wanted} is not listed.")));
    }
    for (agent, entry) in &gone {
        let (pattern, agent) = (printable(&entry.pattern), printable(agent));
        lines.push(format!("Revoked {pattern} (arguments: {}) for {agent}.", arguments(entry)));
    }
    Ok(true)
}

fn check(
    store: &Store,
    agent: &str,
    cwd: Option<&Path>,
    command: &[String],
    lines: &mut Vec<String>,
) -> Result<bool, CliError> {
    match super::approve(store, command, cwd, Some(agent)) {
        Ok(approved) => {
            let why = match &approved.entry {
                Some(entry) => format!("{} is listed, arguments: {}", printable(&entry.pattern), arguments(entry)),
                None => "every command may run".to_owned(),
            };
            lines.push(format!("It would run: {}\n({why})", printable(&approved.executable.display())));
            Ok(true)
        }
        Err(refusal) => {
            lines.push(format!("It would be refused: {refusal}"));
            if let Loaded::Unusable(why) = store.load() {
                lines.push(format!("The policy file is not usable: {why}."));
            }
            Ok(false)
        }
    }
}
