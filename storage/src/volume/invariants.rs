//! What is always true of a volume between two operations, as far as it can be said without reading the tree. (`check` reads it.)

use super::Volume;

impl Volume {
    /// See the module; an error says what is not so.
    pub fn invariants(&self) -> Result<(), String> {
        self.space.invariants()?;
        let (inodes, last) = (self.inodes, self.last_inode);
        base::always!(inodes > 0 && inodes <= last, "{inodes} inodes with numbers up to {last}");
        let counted = self.accounts.inodes();
        let (snapshots, ages) = (self.snapshots.len(), self.space.ages.len());
        base::always!(snapshots == ages, "{snapshots} snapshots, and {ages} that hold blocks back");
        base::always!(counted >= inodes, "users have {counted} inodes of {inodes}");
        Ok(())
    }
}
