// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"fmt"
	"strconv"
	"time"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
)

// Names of the operator's tables.
const (
	NodeConfigTableName    = "networkdriver-node-configs"
	ClusterConfigTableName = "networkdriver-cluster-configs"
)

// State is how far a node config is.
type State string

// States of a node config.
const (
	// StateInSync means that it is as desired.
	StateInSync State = "InSync"
	// StatePending means that it is to be written.
	StatePending State = "Pending"
	// StateFailed means that the API server has refused it. It is tried again.
	StateFailed State = "Failed"
	// StateFrozen means that it stays as it is: the cluster config that it was made from is in conflict or invalid, or
	// its node has had no CiliumNode since the definition of these was made anew.
	StateFrozen State = "Frozen"
)

// NodeConfig is a desired node config. Rows are immutable: a change is a new row under the same key.
type NodeConfig struct {
	// Node is the name of the node and of its node config.
	Node string
	// ClusterConfig is the config that governs the node, or from which a frozen node config was made. It is empty for a
	// node config that is to be deleted.
	ClusterConfig string
	// Spec is the digest of the desired spec, of a frozen node config that of its own.
	Spec  string
	State State
	// Error says why the state is Failed.
	Error string `json:",omitempty"`
}

// TableHeader implements [statedb.TableWritable].
func (*NodeConfig) TableHeader() []string {
	return []string{"Node", "ClusterConfig", "Spec", "State", "Error"}
}

// TableRow implements [statedb.TableWritable].
func (n *NodeConfig) TableRow() []string {
	return []string{n.Node, n.ClusterConfig, n.Spec, string(n.State), n.Error}
}

// ClusterConfig is a cluster config and how it fares. Rows are immutable.
type ClusterConfig struct {
	Name       string
	Created    time.Time
	Generation int64
	// Selector is the node selector in kubectl's notation; empty for all nodes.
	Selector string
	// Spec is the digest of the spec for nodes.
	Spec string
	// Matched, Governed, InSync, Failed and Frozen count nodes. A config in conflict governs none.
	Matched, Governed, InSync, Failed, Frozen int
	// Winner is the config that it is in conflict with.
	Winner string `json:",omitempty"`
	// Invalid says what is wrong with it.
	Invalid string `json:",omitempty"`
}

// TableHeader implements [statedb.TableWritable].
func (*ClusterConfig) TableHeader() []string {
	return []string{"Name", "Created", "Generation", "Selector", "Matched", "Governed", "InSync", "Failed", "Frozen", "Winner", "Invalid"}
}

// TableRow implements [statedb.TableWritable].
func (c *ClusterConfig) TableRow() []string {
	return []string{c.Name, c.Created.UTC().Format(time.RFC3339), strconv.FormatInt(c.Generation, 10), c.Selector,
		strconv.Itoa(c.Matched), strconv.Itoa(c.Governed), strconv.Itoa(c.InSync), strconv.Itoa(c.Failed), strconv.Itoa(c.Frozen), c.Winner, c.Invalid}
}

var (
	nodeConfigIndex = statedb.Index[*NodeConfig, string]{
		Name:       "node",
		FromObject: func(n *NodeConfig) index.KeySet { return index.NewKeySet(index.String(n.Node)) },
		FromKey:    index.String,
		FromString: index.FromString,
		Unique:     true,
	}
	clusterConfigIndex = statedb.Index[*ClusterConfig, string]{
		Name:       "name",
		FromObject: func(c *ClusterConfig) index.KeySet { return index.NewKeySet(index.String(c.Name)) },
		FromKey:    index.String,
		FromString: index.FromString,
		Unique:     true,
	}

	// NodeConfigByNode queries the desired node configs by the node's name.
	NodeConfigByNode = nodeConfigIndex.Query
	// ClusterConfigByName queries the cluster configs by name.
	ClusterConfigByName = clusterConfigIndex.Query
)

// tables are the operator's two tables.
type tables struct {
	db             *statedb.DB
	nodeConfigs    statedb.RWTable[*NodeConfig]
	clusterConfigs statedb.RWTable[*ClusterConfig]
}

func newTables(db *statedb.DB) (*tables, error) {
	nodeConfigs, err := statedb.NewTable(db, NodeConfigTableName, nodeConfigIndex)
	if err != nil {
		return nil, fmt.Errorf("table %s: %w", NodeConfigTableName, err)
	}
	clusterConfigs, err := statedb.NewTable(db, ClusterConfigTableName, clusterConfigIndex)
	if err != nil {
		return nil, fmt.Errorf("table %s: %w", ClusterConfigTableName, err)
	}
	return &tables{db: db, nodeConfigs: nodeConfigs, clusterConfigs: clusterConfigs}, nil
}

// clear removes all rows.
func (t *tables) clear() error {
	txn := t.db.WriteTxn(t.nodeConfigs, t.clusterConfigs)
	defer txn.Abort()
	if err := t.nodeConfigs.DeleteAll(txn); err != nil {
		return err
	}
	if err := t.clusterConfigs.DeleteAll(txn); err != nil {
		return err
	}
	txn.Commit()
	return nil
}
