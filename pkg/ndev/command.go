// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package ndev is kubectl's plugin ndev. It tells from the API server alone, without access to a node, which devices the nodes have
// and who has them, and of one pod why it has its devices or has not. It only reads.
//
// It imports nothing of the agent, whose packages are for Linux alone.
package ndev

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/cilium/networkdriver/pkg/version"
)

// Command returns the command kubectl-ndev.
func Command(streams genericiooptions.IOStreams) *cobra.Command {
	return command(streams, newPrinting())
}

func command(streams genericiooptions.IOStreams, print *printing) *cobra.Command {
	config := genericclioptions.NewConfigFlags(true)
	var options Options
	root := &cobra.Command{
		Use:   "kubectl-ndev",
		Short: "Network devices of all nodes, and who has them",
		Long: `Lists the network driver's devices of all nodes with pool, claim, pod, interface, network and health.

All comes from the API server: no access to a node or to the agent is needed, but the right to list ResourceSlices,
ResourceClaims and the driver's own resources. "kubectl ndev pod NAME" tells the story of one pod.`,
		Example: `  kubectl ndev                         # all devices
  kubectl ndev --unhealthy             # what is wrong, and nothing else
  kubectl ndev --node node1 -o wide    # one node, with PF, MAC, VLAN and addresses
  kubectl ndev -n team-a               # what the claims of a namespace have
  kubectl ndev pod team-a/app          # why a pod has its devices, or has not`,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl ndev"},
		Version:     version.String(), SilenceUsage: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flag := cmd.Flags().Lookup("namespace"); flag != nil && flag.Changed {
				options.Namespace = *config.Namespace
			}
			c, err := connect(config)
			if err != nil {
				return err
			}
			list, err := c.devices(cmd.Context(), options)
			if err != nil {
				return err
			}
			return print.devices(streams, list)
		},
	}
	config.AddFlags(root.PersistentFlags())
	print.addFlags(root)
	flags := root.Flags()
	flags.StringVar(&options.Node, "node", "", "Only devices of the node")
	flags.StringVar(&options.Pool, "pool", "", "Only devices of the pool, by its configured name")
	flags.StringVar(&options.Network, "network", "", "Only devices that have joined the network")
	flags.BoolVar(&options.Unhealthy, "unhealthy", false, "Only devices that something is wrong with")
	root.PersistentFlags().StringVar(&options.Driver, "driver", "",
		"Only devices of the driver of this name; left out, of all drivers that the NodeConfigs name")
	root.AddCommand(podCommand(config, print, streams, &options))
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	return root
}

func podCommand(config *genericclioptions.ConfigFlags, print *printing, streams genericiooptions.IOStreams,
	options *Options) *cobra.Command {
	return &cobra.Command{
		Use:     "pod [NAMESPACE/]NAME",
		Aliases: []string{"pods", "po"},
		Short:   "The whole story of a pod's devices: asked, allotted, status, events, what is missing and what to do",
		Example: `  kubectl ndev pod team-a/app
  kubectl ndev pod app -n team-a -o yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			namespace, name, both := strings.Cut(args[0], "/")
			if !both {
				name = args[0]
				var err error
				if namespace, _, err = config.ToRawKubeConfigLoader().Namespace(); err != nil {
					return err
				}
			}
			if namespace == "" || name == "" || strings.Contains(name, "/") {
				return fmt.Errorf("%q is no pod: NAME or NAMESPACE/NAME is", args[0])
			}
			if flag := cmd.Flags().Lookup("namespace"); both && flag != nil && flag.Changed && *config.Namespace != namespace {
				return errors.New("the pod's namespace is given twice, and not the same: leave out --namespace")
			}
			c, err := connect(config)
			if err != nil {
				return err
			}
			story, err := c.story(cmd.Context(), namespace, name, options.Driver)
			if err != nil {
				return err
			}
			return print.story(streams, story)
		},
	}
}
