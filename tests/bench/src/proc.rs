//! CPU time and memory of processes, from /proc.

use std::fs;

use rustix::process::{Resource, getrlimit, setrlimit};
use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cpu {
    pub user_s: f64,
    pub sys_s: f64,
}

impl Cpu {
    pub fn total(self) -> f64 {
        self.user_s + self.sys_s
    }

    pub fn since(self, earlier: Cpu) -> Cpu {
        Cpu { user_s: self.user_s - earlier.user_s, sys_s: self.sys_s - earlier.sys_s }
    }
}

/// User and system time of all `pids` together; a process that is gone counts as zero.
pub fn cpu(pids: &[u32]) -> Cpu {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let mut sum = Cpu::default();
    for pid in pids {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if let Some((user, sys)) = parse_stat(&stat) {
            sum.user_s += user as f64 / ticks;
            sum.sys_s += sys as f64 / ticks;
        }
    }
    sum
}

/// Fields 14 and 15 of /proc/PID/stat; the command name before them may hold spaces.
fn parse_stat(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Resident memory of all `pids` together, in KiB.
pub fn rss_kib(pids: &[u32]) -> u64 {
    pids.iter()
        .filter_map(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
            line.split_ascii_whitespace().next()?.parse::<u64>().ok()
        })
        .sum()
}

/// Lets this process open as many files as the system allows it.
pub fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Then it opens as many as it may, and says what it could not.
    let _as_it_is = setrlimit(Resource::Nofile, limit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_fields_follow_the_last_parenthesis() {
        let stat = "7 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 12 34 0 0";
        assert_eq!(parse_stat(stat), Some((12, 34)));
    }

    #[test]
    fn own_memory_is_not_zero() {
        assert!(rss_kib(&[std::process::id()]) > 0);
    }
}
